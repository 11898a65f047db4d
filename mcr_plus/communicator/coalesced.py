"""Coalesced calls: many tensors in few operations, with one handle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mcr_plus.communicator.calls import Call, CallOptions, Compress, check_options
from mcr_plus.communicator.tensors import check_apart, check_distinct, is_plain, plain
from mcr_plus.core.kinds import Kind, ReduceOp
from mcr_plus.core.message import Signature, frozen
from mcr_plus.core.work import JointWork, Work
from mcr_plus.errors import McrError
from mcr_plus.fusion.coalesce import Coalescer

if TYPE_CHECKING:
    from mcr_plus.communicator.operations import Operations
    from mcr_plus.core.group import Group
    from mcr_plus.core.message import Extras
    from mcr_plus.pipeline.pipeline import Pipeline


class CoalescedCalls:
    """Coalesced calls of a group: the codecs' block sizes, and the buffers that tensors are packed into."""

    def __init__(self, group: Group, pipeline: Pipeline, compresses: bool) -> None:
        """`compresses`: True if the pipeline has a compress stage."""
        self._group = group
        self._pipeline = pipeline
        self._compresses = compresses
        self._coalescer = Coalescer(group.size)
        self._known: dict[Any, int] = {}  # block sizes by codec and dtype

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the allocated buffers."""
        return self._coalescer.buffer_bytes

    def _blocks(self, tensors: Sequence[torch.Tensor], compress: Compress) -> dict[torch.dtype, int]:
        """Return the codec's block size, in elements, for each dtype that a call with `compress` packs."""
        if not self._compresses or compress is False:
            return {}
        codec = frozen(compress) if isinstance(compress, Mapping) else compress
        blocks = {}
        for dtype in {tensor.dtype for tensor in tensors}:
            key = (codec, dtype)
            if key not in self._known:
                group = self._group
                like = Signature("all_reduce", dtype, (), None, group.name, group.size, compress=codec)
                self._known[key] = self._pipeline.treatment(like).alignment
            blocks[dtype] = self._known[key]
        return blocks

    def issue(
        self,
        comm: Operations,
        kind: Kind,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        async_op: bool,
        options: CallOptions,
        op: ReduceOp | None = None,
    ) -> Work | None:
        """Issue `kind` for each pair of input and output; small tensors of one dtype share an operation.

        For in-place operations, `outputs` is `inputs`. Unsupported operations raise before any data is sent.
        """
        check_options(kind, op, options)
        check_distinct(outputs)
        strided = [index for index, output in enumerate(outputs) if not is_plain(output)]
        for index in strided:
            check_apart(outputs[index])
        targets = outputs if not strided else [plain(output) for output in outputs]
        sources = targets if inputs is outputs else [plain(value) for value in inputs]
        blocks = self._blocks(sources, options.get("compress"))
        parts = self._coalescer.parts(kind, sources, targets, blocks)
        ready = []
        try:
            for part in parts:
                source, target = part.source, part.target
                larger, smaller = (target, source) if kind == "all_gather" else (source, target)
                extras: Extras = {"fused": len(part.numels), "already_bucketed": True}
                call = Call(
                    kind, (source,), (target,), smaller.shape, larger.numel(), reduce_op=op, extras=extras,
                    called=part.call,
                )  # fmt: skip
                ready.append(comm.prepared(call, True, options))
        except McrError:  # no data has been sent
            for part in parts:
                part.release()
            raise
        works = [each.start() for each in ready]
        for work, part in zip(works, parts, strict=True):
            work.then(part.finish)
        nbytes = sum(tensor.nbytes for tensor in (outputs if kind == "all_gather" else inputs))
        joint = JointWork(works, f"{kind}_coalesced", nbytes=nbytes, tag=options.get("tag"))
        for part in parts:
            joint.then(part.release)
        if strided:
            joint.then(lambda: _assign_all([(outputs[index], targets[index]) for index in strided]))
        if async_op:
            return joint
        joint.wait()
        return None


def _assign_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, value in pairs:
        tensor.copy_(value)
