"""Weights from trainers into the workers of vLLM: its weight transfer engine `mcr`, see `vllm_plugin`."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from mcr_plus.engines.loader_reads import reads_of
from mcr_plus.engines.vllm_plugin import TESTED
from mcr_plus.errors import BackendError, InvalidArgument, McrError, Unsupported, short
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.regions import Boxes, meet_all, volumes
from mcr_plus.weight_sync.endpoint_file import EndpointFile
from mcr_plus.weight_sync.join import invited, join_sync
from mcr_plus.weight_sync.shards import HeldShard
from mcr_plus.weight_sync.sync import WeightSync

try:
    _vllm: Any = import_module("vllm")
except ImportError as error:
    raise ImportError(f"mcr_plus.engines.vllm needs vLLM: pip install vllm ({error})") from error

_CATCHES_UP: Final = 30.0  # s for a worker to get a version that another one has
_log = logging.getLogger("mcr_plus")
if not _vllm.__version__.startswith(f"{TESTED}."):
    raise Unsupported(
        f"vLLM {_vllm.__version__}: mcr_plus.engines.vllm needs {TESTED}; other versions have other "
        "weight transfer engines"
    )
_base: Any = import_module("vllm.distributed.weight_transfer.base")


@dataclass
class McrInitInfo(_base.WeightTransferInitInfo):  # type: ignore[misc]
    """Argument of `init_weight_transfer_engine`, as for `mcr.join_sync`.

    `invitation`: the file. `timeout`: seconds to wait for it and for its sources; vLLM serves nothing then.
    """

    invitation: str
    timeout: float = 10.0


@dataclass
class McrUpdateInfo(_base.WeightTransferUpdateInfo):  # type: ignore[misc]
    """Argument of `update_weights`.

    `timeout`: seconds to wait for a newer version than the model's, while vLLM serves nothing. With 0, the
    newest that has arrived is loaded, if there is one.
    """

    timeout: float = 0.0


class McrWeightTransferEngine(_base.WeightTransferEngine):  # type: ignore[misc]
    """Receiver of weights in a worker of vLLM: a tensor parallel rank gets only elements that it loads.

    An update loads the newest version that all workers of the model have, in one call between two steps of
    generation; `start_weight_update` and `finish_weight_update` have nothing to do. Memory on the host: two
    copies of the worker's part of the checkpoint.
    """

    init_info_cls, update_info_cls = McrInitInfo, McrUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        """Create the engine as vLLM's factory does."""
        super().__init__(*arguments)
        self._sync: WeightSync | None = None
        self._held: dict[str, HeldShard] = {}
        self._state: dict[str, torch.Tensor] = {}
        self._arrived = self._loaded = 0

    def init_transfer_engine(self, init_info: McrInitInfo) -> None:
        """Join the synchronisation of the invitation, then leave the one before; collective over the workers.

        Raises `BackendError` on the last worker, see `_raise`: there is no invitation, its sources do not
        answer, the offered tensors do not fit the model, or no offer has what a worker loads. The text names
        all misfits.
        """
        found = joined = None
        tensors: dict[str, HeldShard] = {}
        needs: dict[str, Boxes] = {}
        held: list[HeldShard] = []
        state: dict[str, torch.Tensor] = {}
        problems: list[str] = []
        try:
            found = invited(init_info.invitation, init_info.timeout)
            tensors = {each.name: each._replace(boxes=None) for offer in found.offers for each in offer.held}
            needs, problems = reads_of(self.model, self.model_config, tensors.values())
        except Exception as error:  # of any kind: the other workers wait
            problems = [str(error) or repr(error)]
        everywhere = _everywhere((needs, problems, found and found.key))
        problems = list(dict.fromkeys(text for _, texts, _ in everywhere for text in texts))
        if len({key for *_, key in everywhere}) > 1:
            problems = problems or ["other trainers have begun meanwhile"]
        problems += _read_in_part(tensors, [boxes for boxes, *_ in everywhere])
        if found is not None and not problems:
            try:
                held = self._offered(found, needs)
                state, layout = _tensors(held)
                joined = join_sync(init_info.invitation, state, layout, timeout=init_info.timeout)
            except Exception as error:
                problems = [str(error) or repr(error)]
            problems = list(dict.fromkeys(text for texts in _everywhere(problems) for text in texts))
        if problems or joined is None:
            if joined is not None:
                joined.close()
            return self._raise(
                f"weights for vLLM by {init_info.invitation!r}: {'; '.join(problems)} (expected: names, "
                "shapes and dtypes of the server's checkpoint, as model.state_dict() has them)"
            )
        self.shutdown()
        self._sync, self._state, self._held = joined, state, {each.name: each for each in held}
        self._arrived = self._loaded = 0
        return None

    def _raise(self, text: str) -> None:
        """Raise on the last worker alone; the others return.

        vLLM reads the workers' answers in order, up to the first error, and takes those that it has not read
        for answers to its next call (`findings/vllm_answers_after_an_error.sh`).
        """
        if self.parallel_config.rank == self.parallel_config.world_size - 1:
            raise BackendError(text)

    def _offered(self, found: EndpointFile, needs: dict[str, Boxes]) -> list[HeldShard]:
        """Return the shards of the smallest offer that covers what this worker loads."""
        offers = {each.name: each.held for each in found.offers}
        lacking = {name: _lacking(needs, {each.name: each for each in held}) for name, held in offers.items()}
        best = min((held for name, held in offers.items() if not lacking[name]), key=_nbytes, default=None)
        rank, size = self.parallel_config.rank, self.parallel_config.tensor_parallel_size
        is_split = any(each.boxes is not None for held in offers.values() for each in held)
        if best is None or (size > 1 and is_split and all(each.boxes is None for each in best)):
            lacks = [f"{name}: lacks {short(names)}" for name, names in lacking.items() if names]
            raise InvalidArgument(
                f"nothing is offered for worker {rank} of {size} in tensor parallel: {'; '.join(lacks)} "
                "(tensor_parallel_offers makes offers for the trainers' mcr.sync)"
            )
        return best

    def start_weight_update(self) -> None:
        """Do nothing."""

    def finish_weight_update(self) -> None:
        """Do nothing."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the newest version, see `McrUpdateInfo`; raises on all workers as `WeightSync.pull` does."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: McrUpdateInfo) -> None:
        """Load the newest version, as `update_weights` does."""
        if problem := self._updated(update_info.timeout):
            raise BackendError(problem)

    def update(self, timeout: float = 0.0) -> int:
        """Load the newest version, see `McrUpdateInfo`; return it. Raises on the last worker alone."""
        if problem := self._updated(timeout):
            self._raise(problem)
        return self._loaded

    def _updated(self, timeout: float) -> str:
        version, problem = self._agreed(timeout)
        if not problem and version != self._loaded:
            reload = import_module("vllm.model_executor.model_loader.reload")
            with import_module("vllm.config").set_current_vllm_config(self.vllm_config), self.device:
                reload.initialize_layerwise_reload(self.model)
                self.model.load_weights((name, self._whole(name)) for name in self._held)
                reload.finalize_layerwise_reload(self.model, self.model_config)
            self._loaded = version
        return problem

    def _whole(self, name: str) -> torch.Tensor:
        """Return a tensor of the shape in the checkpoint, of which this worker's part is filled."""
        held, local = self._held[name], self._state[name]
        if held.boxes is None:
            return local
        # The rest is not read, and does not come into memory.
        whole = torch.empty(held.shape, dtype=local.dtype, device="cpu")
        at = 0
        for box in _boxes(held):
            part = whole[tuple(slice(*ends) for ends in box)]
            part.copy_(local.flatten()[at : at + part.numel()].view(part.shape))
            at += part.numel()
        return whole

    def versions(self) -> tuple[int, int] | None:
        """Return the newest version that has arrived, and the one that the model has; 0 for none.

        Returns None without trainers: before they are joined, or after they have ended or died, and their
        last version is loaded.
        """
        try:
            self._look()
        except BackendError as error:
            _log.warning("vLLM keeps version %d of its weights: %s", self._loaded, error)
            return None
        return self._arrived, self._loaded

    def _look(self) -> None:
        """Note the newest version that has arrived; raises like `pull` if there will be no newer one."""
        try:
            self._arrived = self._joined.pull(wait=False) or self._arrived
        except BackendError:
            if self._arrived == self._loaded:
                raise

    @property
    def _joined(self) -> WeightSync:
        if self._sync is None:
            raise BackendError("weight transfer engine 'mcr': call init_weight_transfer_engine first")
        return self._sync

    def _agreed(self, timeout: float) -> tuple[int, str]:
        """Pull until all workers of the model have the same version; return it, and the text of an error."""
        ends, aim, problem = time.monotonic() + timeout, self._loaded + (timeout > 0), ""
        while True:
            try:
                if not timeout:
                    self._look()
                while self._arrived < aim:
                    left = max(0.0, ends - time.monotonic())
                    self._arrived = self._joined.pull(timeout=left) or self._arrived
            except McrError as error:
                problem = str(error)
            answers: list[tuple[int, str]] = _everywhere((self._arrived, problem))
            aim = max(version for version, _ in answers)
            problem = next((text for _, text in answers if text), "")
            if problem or all(version == aim for version, _ in answers):
                return aim, problem
            ends = max(ends, time.monotonic() + _CATCHES_UP)  # it is on its way to the others

    def shutdown(self) -> None:
        """Leave the synchronisation."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None


def _everywhere(mine: Any) -> list[Any]:
    """Return the answers of all workers of the model, in tensor and pipeline parallel."""
    state, answers = import_module("vllm.distributed.parallel_state"), [mine]
    for group in (state.get_tp_group(), state.get_pp_group()):
        if group.world_size > 1:
            found: list[Any] = [None] * group.world_size
            dist.all_gather_object(found, answers, group=group.cpu_group)
            answers = [each for listed in found for each in listed]
    return answers


def _tensors(held: list[HeldShard]) -> tuple[dict[str, torch.Tensor], dict[str, Layout]]:
    """Return new tensors for these shards, and the layouts of those that are parts."""
    layouts = {
        each.name: Layout.boxes(each.shape, {0: _boxes(each)}) for each in held if each.boxes is not None
    }
    shapes = {name: each.local_shape(0) for name, each in layouts.items()}
    return {
        each.name: torch.zeros(shapes.get(each.name) or each.shape, dtype=_dtype(each), device="cpu")
        for each in held
    }, layouts


def _read_in_part(tensors: dict[str, HeldShard], everywhere: list[dict[str, Boxes]]) -> list[str]:
    """Describe tensors that all workers together read only in part, as loaders do with larger ones."""
    found = []
    for name, tensor in tensors.items():
        read = [np.concatenate(boxes[name], axis=1) for boxes in everywhere if name in boxes]
        if read:
            corners = np.hsplit(np.unique(np.concatenate(read), axis=0), 2)
            if volumes(*corners).sum() < tensor.bounds.volumes[0]:
                found.append(f"{tensor} is only read in part")
    return found


def _lacking(needs: dict[str, Boxes], held: dict[str, HeldShard]) -> list[str]:
    """Return the names of tensors of which elements that are needed are not held."""
    return [
        name
        for name, boxes in needs.items()
        if name not in held or meet_all(boxes, held[name].bounds)[2].volumes.sum() < boxes.volumes.sum()
    ]


def _nbytes(held: list[HeldShard]) -> int:
    total: int = sum(int(each.bounds.volumes.sum()) * _dtype(each).itemsize for each in held)
    return total


def _dtype(shard: HeldShard) -> torch.dtype:
    found: torch.dtype = getattr(torch, shard.dtype)
    return found


def _boxes(shard: HeldShard) -> list[list[tuple[int, int]]]:
    """Return the boxes of a shard; a box is the bounds in each dimension."""
    sides = (side.tolist() for side in shard.bounds)
    return [list(zip(low, high, strict=True)) for low, high in zip(*sides, strict=True)]
