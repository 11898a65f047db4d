"""Collective groups of Ray's actors over mcr_plus: backend `MCR` of `ray.util.collective`.

from mcr_plus.engines import ray as mcr_ray

mcr_ray.register()  # in the driver and in each actor, as Ray demands
ray.util.collective.init_collective_group(size, rank, backend="MCR", group_name="default")
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from mcr_plus.core.addresses import family_of, is_loopback, place_of_text, place_text
from mcr_plus.core.c10d import PrefixStore
from mcr_plus.errors import LaunchError, Unsupported
from mcr_plus.job.process import job
from mcr_plus.rendezvous.network import prefer
from mcr_plus.rendezvous.store import exchange
from mcr_plus.rendezvous.store_connections import met_in, own_server, prefer_family_of
from mcr_plus.torch_backend.jobs import begin, torch_job

if TYPE_CHECKING:
    from mcr_plus.communicator.communicator import Communicator
    from mcr_plus.core.c10d import Store

try:
    _ray: Any = import_module("ray")
except ImportError as error:
    raise ImportError(f"mcr_plus.engines.ray needs Ray: pip install ray ({error})") from error

NAME: Final = "MCR"
_TESTED: Final = "2.60"
_METHODS: Final = {
    "allgather", "allreduce", "barrier", "broadcast", "check_backend_availability", "recv", "reduce",
    "reducescatter", "send",
}  # fmt: skip
_MEETS_WITHIN: Final = 120.0  # s for all ranks of a group to call init_collective_group
_TRIES_FOR: Final = 5.0  # s to connect to a place
_NAP: Final = 0.05


def _base() -> Any:
    """Return Ray's class of groups. Raises `Unsupported`, naming the version, if it is another one."""
    with suppress(ImportError):
        found = import_module("ray.util.collective.collective_group.base_collective_group").BaseGroup
        registry = import_module("ray.util.collective.backend_registry")
        if found.__abstractmethods__ == _METHODS and hasattr(registry, "register_collective_backend"):
            return found
    raise Unsupported(
        f"Ray {_ray.__version__} has other collective groups than mcr_plus.engines.ray implements, which was "
        f"tested with Ray {_TESTED}"
    )


def register() -> None:
    """Register the backend `MCR` with `ray.util.collective` in this process; a second call does nothing."""
    registry = import_module("ray.util.collective.backend_registry")
    if not registry._global_registry.is_registered(NAME):
        registry.register_collective_backend(NAME, RayGroup)


class RayGroup(_base()):  # type: ignore[misc]
    """Collective group of Ray's actors. The pipeline is that of MCR_CONFIG.

    The first group of a process starts a job of mcr_plus, which ends with the process's last group. Further
    groups must have members of that job alone. Tensors are torch's, or arrays that share memory with them.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        """Open the group; collective over its ranks.

        Raises `LaunchError` if ranks do not meet within two minutes, and `Unsupported` if only some of them
        are in a job, or they are in different ones.
        """
        super().__init__(world_size, rank, group_name)
        self._comm = _opened(*_met(group_name, rank, world_size), rank, world_size, group_name)

    @classmethod
    def backend(cls) -> str:
        """Return the name of the backend."""
        return NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Return True: the backend needs nothing that may be missing."""
        return True

    def destroy_group(self) -> None:
        """Leave the group; with the last group of this process, also its job."""
        torch_job.leave(self._comm)

    def allreduce(self, tensor: list[Any], allreduce_options: Any = None) -> None:
        """Reduce `tensor[0]` in place, on all ranks."""
        self._comm.all_reduce(_only(tensor, "allreduce"), _op(allreduce_options))

    def barrier(self, barrier_options: Any = None) -> None:  # noqa: ARG002 - Ray's signature
        """Wait for all ranks."""
        self._comm.barrier()

    def reduce(self, tensor: list[Any], reduce_options: Any) -> None:
        """Reduce `tensor[0]` in place, on the root; other ranks keep theirs."""
        root, op = self._comm.ranks[reduce_options.root_rank], _op(reduce_options)
        self._comm.reduce(_only(tensor, "reduce"), root, op)

    def allgather(self, tensor_list: list[Any], tensor: list[Any], options: Any = None) -> None:  # noqa: ARG002
        """Write each rank's `tensor[0]` to its place in `tensor_list[0]`."""
        self._comm.all_gather(_only(tensor_list, "allgather"), _only(tensor, "allgather"))

    def broadcast(self, tensor: list[Any], broadcast_options: Any) -> None:
        """Write the root's `tensor[0]` to that of all ranks."""
        self._comm.broadcast(_only(tensor, "broadcast"), self._comm.ranks[broadcast_options.root_rank])

    def reducescatter(self, tensor: list[Any], tensor_list: list[Any], options: Any = None) -> None:
        """Write the sum, or other reduction, of all ranks' `tensor_list[0][rank]` to `tensor[0]`."""
        out, parts = _only(tensor, "reducescatter"), _only(tensor_list, "reducescatter")
        self._comm.reduce_scatter(out, parts, _op(options))

    def send(self, tensor: list[Any], send_options: Any) -> None:
        """Send `tensor[0]` to a rank."""
        self._comm.send(_only(tensor, "send"), self._comm.ranks[send_options.dst_rank])

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        """Receive `tensor[0]` from a rank."""
        self._comm.recv(_only(tensor, "recv"), self._comm.ranks[recv_options.src_rank])


def _met(name: str, rank: int, size: int) -> tuple[Store, str]:
    """Return a new store of the group, on rank 0's node, and a random name that its ranks have in common.

    The place of the store is in Ray's key-value store meanwhile.
    """
    kv = import_module("ray.experimental.internal_kv")
    digest = hashlib.sha256(name.encode()).hexdigest()
    key = f"mcr_plus/{_ray.get_runtime_context().get_job_id()}/{digest}"
    found = ""
    if rank == 0:
        address = str(_ray.util.get_node_ip_address())
        prefer(family_of(address))
        place = own_server(_MEETS_WITHIN, everywhere=not is_loopback(address))
        found = f"{secrets.token_hex(8)} {place_text(*place)}"
        kv._internal_kv_put(key, found)
    ends, tried, problem = time.monotonic() + _MEETS_WITHIN, "", "it has not written its place"
    try:
        while True:
            text = (kv._internal_kv_get(key) or b"").decode() if rank else found
            if text != tried:
                tried, (prefix, _, place_as_text) = text, text.partition(" ")
                try:
                    store = met_in(*place_of_text(place_as_text), _TRIES_FOR)
                    break
                except LaunchError as error:  # a group that was killed may have left its place
                    problem = str(error)
            if time.monotonic() > ends:
                raise LaunchError(
                    f"collective group {name!r}: rank 0 did not call init_collective_group within "
                    f"{_MEETS_WITHIN:g} s ({problem})"
                )
            time.sleep(_NAP)
        store.set_timeout(timedelta(seconds=_MEETS_WITHIN))
        prefer_family_of(store)
        store = PrefixStore(prefix, store)
        exchange(store, rank, size, "ray", "", _MEETS_WITHIN)
    finally:
        if rank == 0:
            kv._internal_kv_del(key)
    return store, prefix


def _opened(store: Store, drawn: str, rank: int, size: int, name: str) -> Communicator:
    """Open a group of this process's job, or start the job."""
    running = job.runtime if job.runtime is not None and not job.runtime.closed else None
    own = None
    if running is not None:
        if torch_job.runtime is not running:  # `mcr.init` has joined it
            torch_job.enter(running, tuple(range(running.world.size)), joined=False)
        secret = hashlib.sha256(running.world.secret).hexdigest()  # without one it is a job of one rank
        known = secret if running.world.size > 1 else secrets.token_hex(8)
        own = [running.attached.setdefault("ray job", known), running.world.rank]
    answers = [
        json.loads(text) for text in exchange(store, rank, size, "job", json.dumps(own), _MEETS_WITHIN)
    ]
    if not any(answers):
        comm = begin(PrefixStore("job", store), rank, size, timedelta(seconds=300), None)
        assert job.runtime is not None
        job.runtime.attached["ray job"] = drawn
        return comm
    outside = [each for each, answer in enumerate(answers) if answer is None or answer[0] != answers[0][0]]
    if outside or running is None:
        raise Unsupported(
            f"collective group {name!r}: a process has one job of mcr_plus, and ranks {outside} are not in "
            "that of the others; destroy the earlier groups first, or begin with a group of all actors"
        )
    ranks = [job_rank for _, job_rank in answers]
    return torch_job.open(running, ranks, f"ray/{name}", running.loaded)


def _only(tensors: list[Any], method: str) -> Any:
    """Return the tensor, or the list, of a process; Ray passes several for several GPUs of one process."""
    if len(tensors) != 1:
        raise Unsupported(
            f"{method}: {len(tensors)} tensors of one process; a process has one rank in {NAME}"
        )
    return tensors[0]


def _op(options: Any) -> Any:
    return "SUM" if options is None else options.reduceOp.name  # Ray's names are ours
