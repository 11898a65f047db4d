"""Plugin of vLLM: registers the weight transfer engine `mcr`, and lets servers follow trainers by themselves.

The trainers call `mcr.sync(…, invite="policy.sync")`, and push. A server follows them by itself:

    VLLM_PLUGINS=mcr_plus vllm serve MODEL --weight-transfer-config '{"backend": "mcr"}' \\
        --additional-config '{"mcr_plus": {"invitation": "policy.sync"}}'

A program that has vLLM's `LLM` or `AsyncLLM` calls its `init_weight_transfer_engine`, and `update_weights`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from importlib import import_module
from typing import Any, Final

from mcr_plus.errors import ConfigError, short

NAME: Final = "mcr"
TESTED: Final = "0.32"
_LONGEST_NAP: Final = 30.0  # s
_log = logging.getLogger("mcr_plus")


def register() -> None:
    """Register the engine with vLLM in this process, as plugin of `vllm.general_plugins`; may be repeated.

    The engine's module is imported when a worker has loaded its model: vLLM 0.32 without triton cannot start
    a worker on the CPU in which numba is imported (`findings/vllm_cpu_worker_after_numba.sh`). A vLLM without
    such engines is only warned of, as it would not start after an error.
    """
    try:
        factory = import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
        if NAME not in factory._registry:
            factory.register_engine(NAME, "mcr_plus.engines.vllm", "McrWeightTransferEngine")
            worker: Any = import_module("vllm.v1.worker.worker_base").WorkerBase
            worker.mcr_plus = _of_engine  # for `collective_rpc`, as vLLM's plugins add methods
    except (ImportError, AttributeError, TypeError) as error:
        found = getattr(import_module("vllm"), "__version__", "of unknown version")
        _log.warning(
            "vLLM %s gets no weight transfer engine '%s', which needs %s: %s", found, NAME, TESTED, error
        )


def _of_engine(worker: Any, method: str, *arguments: Any) -> Any:
    """Call a method of a worker's engine: "versions", or "update" with a timeout."""
    return getattr(worker.weight_transfer_engine, method)(*arguments)


class Following:
    """Plugin of `vllm.endpoint_plugins`: the server pulls versions as they come. It adds no routes."""

    name, required_tasks = "mcr_plus", None

    def attach_router(self, app: Any) -> None:
        """Do nothing."""

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Begin to follow the invitation of `--additional-config`, if there is one."""
        settings = (args.additional_config or {}).get("mcr_plus")
        if engine_client is not None and settings is not None:
            match settings:
                case {"invitation": str(), **more} if more.keys() <= {"every"}:
                    is_right = isinstance(every := more.get("every", 1), (int, float)) and every > 0
                case _:
                    is_right = False
            if not is_right:
                what = "expected invitation: FILE, and every: SECONDS if wanted"
                raise ConfigError(f"additional_config: mcr_plus: {what}, got {short(settings)}")
            state.mcr_plus = asyncio.create_task(follow(engine_client, **settings))


async def follow(client: Any, invitation: str, every: float = 0.2) -> None:
    """Load each version into a server as it arrives, until cancelled.

    Before an update, sequences in generation are put back, and continued with the new weights from their
    text so far; nothing computed with older weights is used. When the trainers end, the server keeps the last
    version, and waits for the file's next invitation.

    Args:
        client: vLLM's `AsyncLLM`.
        invitation: the file of `mcr.sync`.
        every: seconds between two looks for a newer version.
    """
    base, nap = import_module("vllm.distributed.weight_transfer.base"), every
    while True:
        try:
            if os.path.exists(invitation):
                request = base.WeightTransferInitRequest({"invitation": invitation, "timeout": 0.0})
                await client.init_weight_transfer_engine(request)
                while all(versions := await client.collective_rpc("mcr_plus", args=("versions",))):
                    if all(arrived > loaded for arrived, loaded in versions):
                        await _update(client)
                    nap = every
                    await asyncio.sleep(every)
        except Exception as error:
            nap = min(2 * nap, _LONGEST_NAP)  # vLLM reports each failure at length
            _log.warning("vLLM does not follow %r, and tries again in %g s: %s", invitation, nap, error)
        await asyncio.sleep(nap)


async def _update(client: Any) -> None:
    await client.pause_generation(mode="keep")
    try:
        version, *_ = await client.collective_rpc("mcr_plus", args=("update",))
        await client.start_weight_update()  # not before: after an error vLLM would take it for unfinished
        await client.finish_weight_update(str(version))
        await client.reset_prefix_cache(reset_running_requests=True)
    finally:
        await client.resume_generation()
