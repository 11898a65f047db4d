"""A group of ranks with a pipeline of its own: every operation starts here."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

import torch

from mcr_plus.arrays import (
    as_tensor,
    check_apart,
    is_plain,
    overlap,
    pack,
    pack_space,
    plain,
    plain_like,
    unpack,
)
from mcr_plus.compression.choice import alignment
from mcr_plus.dispatch.stage import SIGNATURES
from mcr_plus.dispatch.work import JointWork, Work
from mcr_plus.errors import BackendError, InvalidArgument, McrError, Unsupported, unknown
from mcr_plus.fusion.coalesce import Coalescer
from mcr_plus.launch.signing import seal, unseal
from mcr_plus.message import (
    REDUCE_OPS,
    REDUCING,
    Group,
    Kind,
    Message,
    ReduceOp,
    Signature,
    check_reducible,
    dtype_name,
    frozen,
)
from mcr_plus.pipeline import Bound, Pipeline
from mcr_plus.rerun import Call, PersistentOp, bind_persistent, check_persistent

if TYPE_CHECKING:
    from mcr_plus.dispatch.engine import GroupState
    from mcr_plus.groups import OpenGroup
    from mcr_plus.interfaces import Issue, Stage
    from mcr_plus.runtime import Runtime

Compress = str | Mapping[str, object] | bool | None

_PLANS = 4 * SIGNATURES  # more than one to a signature: calls may say the same in several ways
_IN_PLACE = ("all_reduce", "broadcast", "reduce")  # kinds whose input is their output


@dataclass(frozen=True)
class Plan:
    """A signature and its bound chain, as found by what a call passes."""

    signature: Signature
    issue: Issue


class P2POp:
    """One send or receive of a batch: `P2POp(mcr.isend, tensor, peer, group=None, tag=0)`."""

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: torch.Tensor,
        peer: int,
        group: Communicator | None = None,
        tag: int = 0,
    ) -> None:
        self.op = op
        self.tensor = tensor
        self.peer = peer
        self.group = group
        self.tag = tag


class Communicator:
    """A group of ranks, its compiled pipeline and its plans.

    Every rank of the group must issue the same operations in the same order, from one thread (autograd's
    threads may issue while their caller waits). As in `torch.distributed`, ranks in arguments (`src`, `dst`)
    are ranks of the whole job, also in sub-groups; lists have one entry per member in group order.

    Common keywords: `async_op=True` returns a `Work`, and the tensors must not be touched before its
    `wait`; `backend` names a library; `compress` is None (the pipeline decides), False (off), a codec's
    name or a mapping with `codec` and its options; `tag` is a free name that rules and logs show.

    Tensors may be torch tensors or anything with DLPack (NumPy, CuPy), strided in any way, of any size.
    What cannot be done raises `Unsupported` on every rank alike, before anything is sent.
    """

    def __init__(self, runtime: Runtime, opened: OpenGroup) -> None:
        self._runtime = runtime
        self.opened = opened
        self.config = opened.config  # of this group's pipeline
        self._group: Group = opened.group
        self._pipeline: Pipeline = opened.pipeline
        self._state: GroupState = opened.state
        self._chains = opened.chains
        self._messages = opened.messages
        self._plans = opened.plans
        self._splits = 0
        self._coalescer = Coalescer(self.size)
        self._alignments: dict[Any, int] = {}  # by codec and dtype

    # -- who we are -------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The group's name, equal on all its ranks."""
        return self._group.name

    @property
    def rank(self) -> int:
        """This process's rank in the group; -1 if it is not a member."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self._group.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks in the whole job, in group order."""
        return self._group.ranks

    def __repr__(self) -> str:
        return f"<Communicator '{self.name}' rank {self.rank} of {self.size}>"

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.close()
        else:
            self._runtime.leave(self, clean=False)

    def close(self) -> None:
        """Close the group and give back what it holds; collective over the group.

        What is in flight is waited for, and its first error is raised when the group is closed. From then
        on every use of the group raises `NotInitialized`; closing it again does nothing. The group of all
        ranks is the job: closing it is `mcr.finalize()`. `with mcr.new_group(ranks) as group:` closes the
        group at the end of the block; after an exception it waits for nobody.

        A group that the program drops without this is closed when all its ranks have dropped it and come
        to another `new_group`, `split` or `branch`, at the latest by `mcr.finalize()`.
        """
        self._runtime.close_together(self.opened)

    def take_over(self) -> None:
        """Make the calling thread the one that issues this group's operations.

        A group is used by the thread that created it, because operations issued by two threads have no
        order that ranks could share. Call this from another thread once the first has stopped using it.
        """
        self.opened.take_over()

    def flush(self) -> None:
        """Send what the fuse stage holds back. Every rank of the group must call it at the same place."""
        self._check_open()
        self._pipeline.flush()

    def branch(self) -> Communicator:
        """Another communicator of the same ranks, for operations in an order of their own; collective."""
        self._check_open()
        self._splits += 1
        self._runtime.agree(self, None, "branch", lambda _: [self.size] * self.size)
        return self._runtime.open_group(f"{self.name}/{self._splits}", self.ranks, checked=True)

    def progress(self) -> None:
        """Let everything in flight advance, for libraries that need the host; returns at once."""
        engine = self._runtime.engine
        with engine.lock:
            engine.progress()

    @property
    def stages(self) -> list[Stage]:
        """The stages of the pipeline that have been built, variants by rules included."""
        return self._pipeline.stages

    @property
    def pipeline(self) -> Pipeline:
        """The stages that operations of this group flow through."""
        return self._pipeline

    def stage_options(self, name: str) -> Any:
        """The options of a stage of the pipeline; None if it is not there."""
        return self.config.options(name)

    def expected_us(
        self,
        kind: Kind,
        dtype: torch.dtype,
        numel: int,
        *,
        op: ReduceOp | None = None,
        device: str = "cpu",
        tag: str | None = None,
    ) -> float | None:
        """Microseconds that a synchronous operation should take by the tuning table; None if unknown.

        `numel`: its payload in elements, as in `Signature.nbytes`. Sends nothing.
        """
        signature = Signature(
            kind, dtype, (numel,), numel * dtype.itemsize, self.name, self.size, device, op, None, tag
        )
        return self._pipeline.expected_us(signature)

    def send_bucket(
        self,
        values: torch.Tensor,
        op: ReduceOp,
        *,
        members: int,
        backend: str | None = None,
        compress: Compress = None,
        tag: str | None = None,
        parts: tuple[tuple[int, ...], ...] | None = None,
        key: str | None = None,
    ) -> Work:
        """Start an all_reduce of a bucket that holds `members` tensors already, so the fuse stage leaves it.

        `values`: contiguous; in place. `parts`, `key`: see `Signature`. For hooks; the same as `all_reduce`
        otherwise.
        """
        work = self._submit(
            "all_reduce", (values,), (values,), values.shape, values.numel(), reduce_op=op, async_op=True,
            backend=backend, compress=compress, tag=tag, parts=parts, key=key, fused=members, whole=True,
        )  # fmt: skip
        assert work is not None
        return work

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that are kept for this group's operations, to use them again."""
        return self._pipeline.buffer_bytes + self._coalescer.buffer_bytes

    @property
    def closed(self) -> bool:
        """Whether the group has been closed, in this process."""
        return self._state.closed

    @property
    def state(self) -> GroupState:
        """What this process knows of the group."""
        return self._state

    @property
    def issued(self) -> int:
        """How many operations this rank has issued in the group."""
        return self._state.sequence

    # -- collectives ------------------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp = "SUM",
        async_op: bool = False,
        *,
        backend: str | None = None,
        compress: Compress = None,
        tag: str | None = None,
    ) -> Work | None:
        """Reduce `tensor` (any shape) over all ranks, in place; all ranks get the same bits."""
        try:
            run = self._plans[
                tensor.dtype,
                tensor.shape,
                tensor.device,
                tensor.is_contiguous(),
                op,
                async_op,
                backend,
                compress,
                tag,
                tensor.requires_grad,
                tensor.is_neg(),
            ]
        except (KeyError, TypeError, AttributeError):
            run = None
        if run is None:
            return self._first_all_reduce(tensor, op, async_op, backend, compress, tag)
        return run(tensor)  # type: ignore[no-any-return]

    def _first_all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp,
        async_op: bool,
        backend: str | None,
        compress: Compress,
        tag: str | None,
    ) -> Work | None:
        value = as_tensor(tensor, "tensor")
        submit = partial(
            self._submit, "all_reduce", (value,), (value,), value.shape, value.numel(),
            reduce_op=op, async_op=async_op, backend=backend, compress=compress, tag=tag,
        )  # fmt: skip
        if not (is_plain(value) and value is tensor and not isinstance(compress, Mapping)):
            return submit()
        plan = self._plan(
            "all_reduce", value, value.shape, value.numel(),
            reduce_op=op, async_op=async_op, backend=backend, compress=compress, tag=tag,
        )  # fmt: skip
        run = _in_place(plan, async_op)
        key = (
            tensor.dtype, tensor.shape, tensor.device, True, op, async_op, backend, compress, tag,
            False, False,
        )  # fmt: skip
        if not value.dtype.is_complex:  # a lazily conjugated tensor would look the same
            self._plans[key] = run
        return submit()

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int,
        async_op: bool = False,
        *,
        backend: str | None = None,
        compress: Compress = None,
        tag: str | None = None,
    ) -> Work | None:
        """Copy `tensor` of rank `src` into that of every rank."""
        value = as_tensor(tensor, "tensor")
        return self._submit(
            "broadcast", (value,), (value,), value.shape, value.numel(), root=self._member(src, "src"),
            async_op=async_op, backend=backend, compress=compress, tag=tag,
        )  # fmt: skip

    def reduce(
        self,
        tensor: torch.Tensor,
        dst: int,
        op: ReduceOp = "SUM",
        async_op: bool = False,
        *,
        backend: str | None = None,
        compress: Compress = None,
        tag: str | None = None,
    ) -> Work | None:
        """Reduce `tensor` over all ranks into that of rank `dst`; the others keep theirs."""
        value = as_tensor(tensor, "tensor")
        root = self._member(dst, "dst")
        target = value if root == self.rank else torch.empty(0, dtype=value.dtype, device=value.device)
        return self._submit(
            "reduce", (value,), (target,), value.shape, value.numel(), root=root, reduce_op=op,
            async_op=async_op, backend=backend, compress=compress, tag=tag,
        )  # fmt: skip

    def all_gather_into_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        async_op: bool = False,
        *,
        backend: str | None = None,
        compress: Compress = None,
        tag: str | None = None,
    ) -> Work | None:
        """Gather every rank's `input` of n elements into `output` of size × n elements, in rank order."""
        target, source = self._gathering(output, input)
        return self._submit(
            "all_gather", (source,), (target,), source.shape, target.numel(),
            async_op=async_op, backend=backend, compress=compress, tag=tag,
        )  # fmt: skip

    def all_gather(
        self,
        tensor_list: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        async_op: bool = False,
        *,
        backend: str | None = None,
        compress: Compress = None,
        tag: str | None = None,
    ) -> Work | None:
        """Gather every rank's `tensor` into `tensor_list`, all of the same size."""
        value = as_tensor(tensor, "tensor")
        parts = self._list(tensor_list, "tensor_list", like=value, same_size=True)
        return self._submit(
            "all_gather", (value,), parts, value.shape, value.numel() * self.size, packed=True,
            async_op=async_op, backend=backend, compress=compress, tag=tag,
        )  # fmt: skip

    def all_gather_v(
        self,
        tensor_list: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        async_op: bool = False,
        *,
        backend: str | None = None,
        compress: Compress = None,
        tag: str | None = None,
    ) -> Work | None:
        """As `all_gather`, with sizes that differ along dim 0; `tensor_list[r]` fits rank r's tensor."""
        value = as_tensor(tensor, "tensor")
        parts = self._list(tensor_list, "tensor_list", like=value)
        mine = parts[self.rank]
        self._expect(mine.numel() == value.numel(), f"tensor_list[{self.rank}]", mine, "tensor", value)
        return self._submit(
            "all_gather_v", (value,), parts, _trailing(value), None, packed=True,
            output_counts=_counts(parts), async_op=async_op, backend=backend, compress=compress, tag=tag,
        )  # fmt: skip

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp = "SUM",
        async_op: bool = False,
        *,
        backend: str | None = None,
        compress: Compress = None,
        tag: str | None = None,
    ) -> Work | None:
        """Reduce `input` of size × n elements over ranks; rank r gets part r in `output` of n elements."""
        target, source = self._scattering(output, input)
        return self._submit(
            "reduce_scatter", (source,), (target,), target.shape, source.numel(), reduce_op=op,
            async_op=async_op, backend=backend, compress=compress, tag=tag,
        )  # fmt: skip

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: ReduceOp = "SUM",
        async_op: bool = False,
        *,
        backend: str | None = None,
        compress: Compress = None,
        tag: str | None = None,
    ) -> Work | None:
        """Reduce `input_list[r]` over ranks into `output` of rank r, all of the same size."""
        target = as_tensor(output, "output")
        parts = self._list(input_list, "input_list", like=target, same_size=True)
        return self._submit(
            "reduce_scatter", parts, (target,), target.shape, target.numel() * self.size, packed=True,
            reduce_op=op, async_op=async_op, backend=backend, compress=compress, tag=tag,
        )  # fmt: skip

    def reduce_scatter_v(
        self,
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: ReduceOp = "SUM",
        async_op: bool = False,
        *,
        backend: str | None = None,
        compress: Compress = None,
        tag: str | None = None,
    ) -> Work | None:
        """As `reduce_scatter`, with sizes that differ along dim 0; `input_list[r]` fits rank r's output."""
        target = as_tensor(output, "output")
        parts = self._list(input_list, "input_list", like=target)
        mine = parts[self.rank]
        self._expect(mine.numel() == target.numel(), f"input_list[{self.rank}]", mine, "output", target)
        return self._submit(
            "reduce_scatter_v", parts, (target,), _trailing(target), None, packed=True, reduce_op=op,
            input_counts=_counts(parts), async_op=async_op, backend=backend, compress=compress, tag=tag,
        )  # fmt: skip

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
        *,
        backend: str | None = None,
        compress: Compress = None,
        tag: str | None = None,
    ) -> Work | None:
        """Send part r of `input` to rank r and receive its part for us into `output`, in rank order.

        Parts are equal, or given by split sizes: rows along dim 0 per rank, which must sum to dim 0.
        Every rank passes split sizes, or none does.
        """
        target, source = as_tensor(output, "output"), as_tensor(input, "input")
        _same_dtype(target, source)
        if output_split_sizes is None and input_split_sizes is None:
            self._expect(target.numel() == source.numel(), "output", target, "input", source)
            self._divisible(source, "input")
            return self._submit(
                "all_to_all", (source,), (target,), source.shape, source.numel(),
                async_op=async_op, backend=backend, compress=compress, tag=tag,
            )  # fmt: skip
        self._expect(_trailing(target) == _trailing(source), "output", target, "the rows of input", source)
        return self._submit(
            "all_to_all_v", (source,), (target,), _trailing(source), None,
            output_counts=self._splits_of(target, output_split_sizes, "output"),
            input_counts=self._splits_of(source, input_split_sizes, "input"),
            async_op=async_op, backend=backend, compress=compress, tag=tag,
        )  # fmt: skip

    def all_to_all(
        self,
        output_list: Sequence[torch.Tensor],
        input_list: Sequence[torch.Tensor],
        async_op: bool = False,
        *,
        backend: str | None = None,
        compress: Compress = None,
        tag: str | None = None,
    ) -> Work | None:
        """Send `input_list[r]` to rank r and receive from it into `output_list[r]`; sizes may differ."""
        targets = self._list(output_list, "output_list")
        sources = self._list(input_list, "input_list", like=targets[0])
        return self._submit(
            "all_to_all_v", sources, targets, (), None, packed=True,
            input_counts=_counts(sources), output_counts=_counts(targets),
            async_op=async_op, backend=backend, compress=compress, tag=tag,
        )  # fmt: skip

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: Sequence[torch.Tensor] | None = None,
        dst: int = 0,
        async_op: bool = False,
        *,
        backend: str | None = None,
        compress: Compress = None,
        tag: str | None = None,
    ) -> Work | None:
        """Gather the ranks' tensors, all of one size, into `gather_list` of rank `dst` (None elsewhere)."""
        value, root = as_tensor(tensor, "tensor"), self._member(dst, "dst")
        parts = self._root_list(gather_list, "gather_list", root, value, same_size=True)
        return self._submit(
            "gather", (value,), parts, value.shape, value.numel() * self.size, packed=True, root=root,
            async_op=async_op, backend=backend, compress=compress, tag=tag,
        )  # fmt: skip

    def gather_v(
        self,
        tensor: torch.Tensor,
        gather_list: Sequence[torch.Tensor] | None = None,
        dst: int = 0,
        async_op: bool = False,
        *,
        backend: str | None = None,
        compress: Compress = None,
        tag: str | None = None,
    ) -> Work | None:
        """As `gather`, with sizes that differ along dim 0."""
        value, root = as_tensor(tensor, "tensor"), self._member(dst, "dst")
        parts = self._root_list(gather_list, "gather_list", root, value)
        return self._submit(
            "gather_v", (value,), parts, _trailing(value), None, packed=True, root=root,
            output_counts=_counts(parts), async_op=async_op, backend=backend, compress=compress, tag=tag,
        )  # fmt: skip

    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: Sequence[torch.Tensor] | None = None,
        src: int = 0,
        async_op: bool = False,
        *,
        backend: str | None = None,
        compress: Compress = None,
        tag: str | None = None,
    ) -> Work | None:
        """Send `scatter_list[r]` of rank `src` (None elsewhere), all of one size, into `tensor` of rank r."""
        value, root = as_tensor(tensor, "tensor"), self._member(src, "src")
        parts = self._root_list(scatter_list, "scatter_list", root, value, same_size=True)
        return self._submit(
            "scatter", parts, (value,), value.shape, value.numel() * self.size, packed=True, root=root,
            async_op=async_op, backend=backend, compress=compress, tag=tag,
        )  # fmt: skip

    def scatter_v(
        self,
        tensor: torch.Tensor,
        scatter_list: Sequence[torch.Tensor] | None = None,
        src: int = 0,
        async_op: bool = False,
        *,
        backend: str | None = None,
        compress: Compress = None,
        tag: str | None = None,
    ) -> Work | None:
        """As `scatter`, with sizes that differ along dim 0."""
        value, root = as_tensor(tensor, "tensor"), self._member(src, "src")
        parts = self._root_list(scatter_list, "scatter_list", root, value)
        return self._submit(
            "scatter_v", parts, (value,), _trailing(value), None, packed=True, root=root,
            input_counts=_counts(parts), async_op=async_op, backend=backend, compress=compress, tag=tag,
        )  # fmt: skip

    def barrier(
        self, async_op: bool = False, *, backend: str | None = None, tag: str | None = None
    ) -> Work | None:
        """Return once every rank has called it."""
        return self._issue(
            "barrier", None, (), 0, (), (), async_op=async_op, backend=backend, compress=None, tag=tag
        )

    # -- coalesced --------------------------------------------------------------------------------

    def all_reduce_coalesced(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp = "SUM",
        async_op: bool = False,
        *,
        backend: str | None = None,
        compress: Compress = None,
        tag: str | None = None,
    ) -> Work | None:
        """`all_reduce` of each tensor, each listed once; small ones of a dtype travel as one. One handle."""
        values = [as_tensor(tensor, "tensor") for tensor in _several(tensors, "tensors")]
        return self._coalesced(
            "all_reduce", values, values, reduce_op=op, async_op=async_op, backend=backend, compress=compress,
            tag=tag,
        )  # fmt: skip

    def all_gather_coalesced(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        async_op: bool = False,
        *,
        backend: str | None = None,
        compress: Compress = None,
        tag: str | None = None,
    ) -> Work | None:
        """`all_gather_into_tensor` of each pair; small ones of a dtype travel as one. One handle."""
        pairs = [self._gathering(*pair) for pair in _pairs(outputs, inputs)]
        return self._coalesced(
            "all_gather", [source for _, source in pairs], [target for target, _ in pairs],
            async_op=async_op, backend=backend, compress=compress, tag=tag,
        )  # fmt: skip

    def reduce_scatter_coalesced(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        op: ReduceOp = "SUM",
        async_op: bool = False,
        *,
        backend: str | None = None,
        compress: Compress = None,
        tag: str | None = None,
    ) -> Work | None:
        """`reduce_scatter_tensor` of each pair; small ones of a dtype travel as one. One handle."""
        pairs = [self._scattering(*pair) for pair in _pairs(outputs, inputs)]
        return self._coalesced(
            "reduce_scatter", [source for _, source in pairs], [target for target, _ in pairs],
            reduce_op=op, async_op=async_op, backend=backend, compress=compress, tag=tag,
        )  # fmt: skip

    def _coalesced(
        self,
        kind: Kind,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        *,
        async_op: bool,
        tag: str | None,
        **call: Any,
    ) -> Work | None:
        strided = [index for index, output in enumerate(outputs) if not is_plain(output)]
        for index in strided:
            check_apart(outputs[index])
        targets = outputs if not strided else [plain(output) for output in outputs]
        sources = targets if inputs is outputs else [plain(value) for value in inputs]
        batch = Batch(self, [])
        parts = self._coalescer.parts(kind, sources, targets, self._blocks(sources, call["compress"]))
        try:
            for part in parts:
                source, target = part.source, part.target
                larger, smaller = (target, source) if kind == "all_gather" else (source, target)
                batch._submit(
                    kind, (source,), (target,), smaller.shape, larger.numel(), async_op=True, tag=tag,
                    fused=len(part.numels), whole=True, called=part.call, **call,
                )  # fmt: skip
        except McrError:  # refused: nothing has been sent
            for part in parts:
                part.release()
            raise
        works = batch.issue()
        for work, part in zip(works, parts, strict=True):
            work.then(part.finish)
        nbytes = sum(tensor.nbytes for tensor in (outputs if kind == "all_gather" else inputs))
        joint = JointWork(works, f"{kind}_coalesced", nbytes=nbytes, tag=tag)
        for part in parts:
            joint.then(part.release)
        if strided:
            joint.then(lambda: _assign_all([(outputs[index], targets[index]) for index in strided]))
        if async_op:
            return joint
        joint.wait()
        return None

    def _blocks(self, tensors: Sequence[torch.Tensor], compress: Compress) -> dict[torch.dtype, int]:
        """How many elements a block of the codec has that tensors of a dtype may get."""
        if self.config.options("compress") is None or compress is False:
            return {}
        codec = frozen(compress) if isinstance(compress, Mapping) else compress
        found = {}
        for dtype in {tensor.dtype for tensor in tensors}:
            key = (codec, dtype)
            if key not in self._alignments:
                like = Signature("all_reduce", dtype, (), None, self.name, self.size, compress=codec)
                self._alignments[key] = alignment(self.config, like)
            found[dtype] = self._alignments[key]
        return found

    # -- point to point ---------------------------------------------------------------------------

    def send(
        self,
        tensor: torch.Tensor,
        dst: int,
        tag: int = 0,
        *,
        backend: str | None = None,
        compress: Compress = None,
        label: str | None = None,
    ) -> None:
        """Send `tensor` to rank `dst`; returns when it may be changed again."""
        self.isend(tensor, dst, tag, backend=backend, compress=compress, label=label).wait()

    def recv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        tag: int = 0,
        *,
        backend: str | None = None,
        compress: Compress = None,
        label: str | None = None,
    ) -> None:
        """Receive into `tensor` from rank `src`, or from whoever sends first with this `tag`."""
        self.irecv(tensor, src, tag, backend=backend, compress=compress, label=label).wait()

    def isend(
        self,
        tensor: torch.Tensor,
        dst: int,
        tag: int = 0,
        *,
        backend: str | None = None,
        compress: Compress = None,
        label: str | None = None,
    ) -> Work:
        """Start a send. `tag` must equal the receiver's; `label` is the name that rules and logs show."""
        value = as_tensor(tensor, "tensor")
        work = self._submit(
            "send", (value,), (), value.shape, value.numel(), peer=self._member(dst, "dst"),
            match_tag=_match_tag(tag), async_op=True, backend=backend, compress=compress, tag=label,
        )  # fmt: skip
        return cast("Work", work)

    def irecv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        tag: int = 0,
        *,
        backend: str | None = None,
        compress: Compress = None,
        label: str | None = None,
    ) -> Work:
        """Start a receive; `Work.source_rank()` says whom it came from."""
        value = as_tensor(tensor, "tensor")
        peer = None if src is None else self._member(src, "src")
        work = self._submit(
            "recv", (), (value,), value.shape, value.numel(), peer=peer,
            match_tag=_match_tag(tag), async_op=True, backend=backend, compress=compress, tag=label,
        )  # fmt: skip
        return cast("Work", work)

    def batch_isend_irecv(self, p2p_ops: Sequence[P2POp]) -> list[Work]:
        """Start all sends and receives of a batch, in any order that peers may also use."""
        ready: list[Callable[[], Work | None]] = []
        for index, operation in enumerate(_several(p2p_ops, "p2p_ops")):
            if not isinstance(operation, P2POp):
                raise InvalidArgument(f"p2p_ops[{index}]: expected a P2POp, got {type(operation).__name__}")
            name = getattr(operation.op, "__name__", "")
            if name not in ("isend", "irecv"):
                raise InvalidArgument(
                    f"p2p_ops[{index}].op: expected mcr.isend or mcr.irecv, got {operation.op!r}"
                )
            if not (operation.group is None or isinstance(operation.group, Communicator)):
                raise InvalidArgument(
                    f"p2p_ops[{index}].group: expected a Communicator or None, got {operation.group!r}"
                )
            batch = Batch(operation.group or self, ready)
            getattr(batch, name)(operation.tensor, operation.peer, operation.tag)
        return Batch(self, ready).issue()

    # -- objects ----------------------------------------------------------------------------------

    def broadcast_object(self, obj: Any, src: int) -> Any:
        """The object of rank `src`, on every rank. Pickled: between the ranks of one's own job only."""
        is_source = self._member(src, "src") == self.rank
        payload = self.pickled(obj) if is_source else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([payload.numel()])
        self.broadcast(length, src, compress=False)
        # In powers of two: a new size would be a new signature, to be bound and compared.
        room = torch.empty(1 << (int(length) - 1).bit_length(), dtype=torch.uint8)
        room[: payload.numel()] = payload
        self.broadcast(room, src, compress=False)
        return obj if is_source else self.unpickled(room[: int(length)], self._member(src, "src"))

    def all_gather_object(self, obj: Any, *, tag: str | None = None) -> list[Any]:
        """Every rank's object, in rank order. Pickled: between the ranks of one's own job only."""
        payload = self.pickled(obj)
        lengths = torch.empty(self.size, dtype=torch.int64)
        self.all_gather_into_tensor(lengths, torch.tensor([payload.numel()]), compress=False, tag=tag)
        parts = [torch.empty(int(length), dtype=torch.uint8) for length in lengths]
        self.all_gather_v(parts, payload, compress=False, tag=tag)
        return [self.unpickled(part, rank) for rank, part in enumerate(parts)]

    def pickled(self, obj: Any) -> torch.Tensor:
        """An object as it travels: bytes (uint8, on the CPU), signed as this rank's in this group."""
        written = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
        sealed = seal(self._runtime.world.secret, f"{self.name}/{self.rank}", written)
        return torch.frombuffer(bytearray(sealed), dtype=torch.uint8)

    def unpickled(self, payload: torch.Tensor, rank: int) -> Any:
        """What `pickled` was given on a rank of the group, counted in the group.

        Raises `BackendError` if that rank has not signed it: to unpickle a stranger's runs his code.
        """
        sealed = payload.numpy().tobytes()
        found = unseal(self._runtime.world.secret, f"{self.name}/{rank}", sealed)
        if found is None:
            raise BackendError(
                f"the object of rank {rank} in group '{self.name}' was not signed by it, and is not unpickled"
            )
        return pickle.loads(found)

    # -- groups and persistent operations ---------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Partition the group: ranks with equal `color`, ordered by `key`, then rank. Collective.

        Returns the new communicator, or None where `color` is None.
        """
        self._check_open()
        self._splits += 1

        def sizes(choices: Sequence[tuple[int | None, int]]) -> list[int]:
            ranks = Counter(chosen for chosen, _ in choices if chosen is not None)
            return [0 if chosen is None else ranks[chosen] for chosen, _ in choices]

        choices = self._runtime.agree(self, (color, key), "split", sizes)
        if color is None:
            return None
        members = sorted((k, index) for index, (c, k) in enumerate(choices) if c == color)
        ranks = tuple(self.ranks[index] for _, index in members)
        return self._runtime.open_group(f"{self.name}.{self._splits}.{color!r}", ranks, checked=True)

    def persistent(self, kind: str, *tensors: Any, **options: Any) -> PersistentOp:
        """Bind an operation to its tensors once: `op()` runs it, `op.start()` returns a `Work`.

        Collective, and so is every call of the result. `kind` is the name of an operation with fixed sizes;
        what follows are its own arguments. The tensors must be contiguous and stay where they are. A
        `Work` must be waited for before the next start.
        """
        check_persistent(kind, tensors, options)
        now, later = Recipe(self), Recipe(self)
        getattr(now, kind)(*tensors, **options)
        getattr(later, kind)(*tensors, async_op=True, **options)
        return bind_persistent(now.call, later.call, self)

    # -- the way down -----------------------------------------------------------------------------

    def _submit(
        self,
        kind: Kind,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        shape: Sequence[int],
        numel: int | None,
        *,
        packed: bool = False,
        **call: Any,
    ) -> Work | None:
        """Make tensors flat and contiguous, issue, and copy results back where that took copies.

        `numel` is the payload in elements, None when it differs between ranks. `packed`: inputs and
        outputs are lists of tensors that travel as one.
        """
        like = (inputs or outputs)[0]
        nbytes = None if numel is None else numel * like.element_size()
        sources, targets, copy_out = self._prepared(inputs, outputs, packed, kind in _IN_PLACE)
        return self._issue(kind, like, shape, nbytes, sources, targets, copy_out=copy_out, **call)

    def _prepared(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], packed: bool, in_place: bool
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], Callable[[], None] | None]:
        if in_place and inputs[0] is outputs[0]:
            value = inputs[0]
            if is_plain(value):
                return (value,), (value,), None
            check_apart(value)
            copy = plain(value)
            return (copy,), (copy,), lambda: _assign(value, copy)
        source = pack(inputs) if packed and len(inputs) > 1 else plain(inputs[0]) if inputs else None
        target, copied = _space(outputs, packed)
        if source is not None and target is not None and overlap(source, target):
            source = source.clone()
        copy_out = None
        if copied and target is not None:
            for output in outputs:
                check_apart(output)
            space = target
            copy_out = lambda: unpack(space.view(-1), outputs)  # noqa: E731 - a name would say no more
        return (() if source is None else (source,)), (() if target is None else (target,)), copy_out

    def _issue(
        self,
        kind: Kind,
        like: torch.Tensor | None,
        shape: Sequence[int],
        nbytes: int | None,
        inputs: tuple[torch.Tensor, ...],
        outputs: tuple[torch.Tensor, ...],
        *,
        async_op: bool,
        backend: str | None,
        compress: Compress,
        tag: str | None,
        reduce_op: ReduceOp | None = None,
        root: int | None = None,
        parts: tuple[tuple[int, ...], ...] | None = None,
        key: str | None = None,
        called: str | None = None,
        copy_out: Callable[[], None] | None = None,
        **rest: Any,
    ) -> Work | None:
        plan = self._plan(
            kind, like, shape, None if nbytes is None or like is None else nbytes // like.element_size(),
            reduce_op=reduce_op, root=root, async_op=async_op, backend=backend, compress=compress, tag=tag,
            parts=parts, bucket=key, called=called,
        )  # fmt: skip
        return self._go(plan, Message(plan.signature, inputs, outputs, **rest), copy_out)

    def _go(self, plan: Plan, message: Message, copy_out: Callable[[], None] | None) -> Work | None:
        work = plan.issue(message)
        if copy_out is not None:
            work.then(copy_out)
        return work if plan.signature.async_op else work.wait()

    def _plan(
        self,
        kind: Kind,
        like: torch.Tensor | None,
        shape: Sequence[int],
        numel: int | None,
        *,
        reduce_op: ReduceOp | None = None,
        root: int | None = None,
        async_op: bool = False,
        backend: str | None = None,
        compress: Compress = None,
        tag: str | None = None,
        parts: tuple[tuple[int, ...], ...] | None = None,
        bucket: str | None = None,
        called: str | None = None,
    ) -> Plan:
        dtype = None if like is None else like.dtype
        device = "cpu" if like is None else like.device.type
        if isinstance(compress, Mapping):
            _check_options(reduce_op, backend, compress, tag)
        codec = frozen(compress) if isinstance(compress, Mapping) else compress
        key = (
            kind, dtype, tuple(shape), numel, device, reduce_op, root, async_op, backend, codec, tag, parts,
            bucket, called,
        )  # fmt: skip
        try:
            plan = self._plans.get(key)
        except TypeError:  # unhashable, so none of the things an option may be
            _check_options(reduce_op, backend, compress, tag)
            raise
        if plan is None:
            _check_options(reduce_op, backend, compress, tag)
            nbytes = None if numel is None else numel * (0 if dtype is None else dtype.itemsize)
            signature = Signature(
                kind, dtype, tuple(shape), nbytes, self.name, self.size, device,
                _reduce_op(reduce_op), root, tag, backend, codec, async_op, None, parts, bucket, None, called,
            )  # fmt: skip
            issue = self._chain(signature).issue
            if len(self._plans) >= _PLANS:  # each rank by itself: plans are made anew of the same chains
                self._plans.clear()
            plan = self._plans[key] = Plan(signature, issue)
        return plan

    def _chain(self, signature: Signature) -> Bound:
        known = self._messages if signature.is_p2p else self._chains
        chain = known.get(signature)
        if chain is None:
            self._check_open()
            self._validate(signature)
            if not signature.is_p2p:
                self.opened.runtime.count()
            elif len(known) >= SIGNATURES:
                known.clear()
                self._plans.clear()
                self.opened.runtime.forget_messages()
            chain = known[signature] = self._pipeline.bind(signature)
        return chain

    def _check_open(self) -> None:
        if self.closed:
            self.state.admit()  # raises: there is nothing left to bind to

    def _validate(self, signature: Signature) -> None:
        if self.rank < 0:
            raise Unsupported(
                f"this rank is not a member of group '{self.name}' (ranks {list(self.ranks)}); "
                "only members may use it"
            )
        if signature.kind in REDUCING and signature.dtype is not None:
            if signature.reduce_op is None:
                raise InvalidArgument(f"op: unknown reduce op None; known: {', '.join(REDUCE_OPS)}")
            check_reducible(signature.reduce_op, signature.dtype)

    # -- arguments --------------------------------------------------------------------------------

    def _member(self, rank: int, name: str) -> int:
        """The group rank of a global rank."""
        local = self._group.local.get(rank) if _is_int(rank) else None
        if local is None:
            raise InvalidArgument(
                f"{name}: rank {rank!r} is not in group '{self.name}'; its ranks: {list(self.ranks)}"
            )
        return local

    def _list(
        self,
        tensors: Sequence[torch.Tensor],
        name: str,
        *,
        like: torch.Tensor | None = None,
        same_size: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
            raise InvalidArgument(
                f"{name}: expected a list of {self.size} tensors, got {type(tensors).__name__}"
            )
        if len(tensors) != self.size:
            raise InvalidArgument(f"{name}: expected {self.size} tensors, one per rank, got {len(tensors)}")
        parts = tuple(as_tensor(tensor, f"{name}[{index}]") for index, tensor in enumerate(tensors))
        first = parts[0] if like is None else like
        for index, part in enumerate(parts):
            _same_dtype(part, first, f"{name}[{index}]")
            if same_size:
                self._expect(
                    part.numel() == first.numel(), f"{name}[{index}]", part, "the rank's own tensor", first
                )
        return parts

    def _root_list(
        self,
        tensors: Sequence[torch.Tensor] | None,
        name: str,
        root: int,
        like: torch.Tensor,
        *,
        same_size: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        if root != self.rank:
            if tensors:
                raise InvalidArgument(f"{name}: only the root, rank {self.ranks[root]}, passes it")
            return ()
        if tensors is None:
            raise InvalidArgument(f"{name}: expected {self.size} tensors on the root, got None")
        parts = self._list(tensors, name, like=like, same_size=same_size)
        self._expect(
            parts[self.rank].numel() == like.numel(), f"{name}[{self.rank}]", parts[self.rank], "tensor", like
        )
        return parts

    def _gathering(self, output: torch.Tensor, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two tensors of an all_gather, checked."""
        target, source = as_tensor(output, "output"), as_tensor(input, "input")
        self._expect(
            target.numel() == source.numel() * self.size, "output", target, f"{self.size} × input", source
        )
        _same_dtype(target, source)
        return target, source

    def _scattering(self, output: torch.Tensor, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two tensors of a reduce_scatter, checked."""
        target, source = as_tensor(output, "output"), as_tensor(input, "input")
        self._expect(
            source.numel() == target.numel() * self.size, "input", source, f"{self.size} × output", target
        )
        _same_dtype(target, source)
        return target, source

    def _splits_of(self, tensor: torch.Tensor, sizes: Sequence[int] | None, name: str) -> tuple[int, ...]:
        rows = tensor.shape[0] if tensor.ndim else 1
        if sizes is None:
            self._divisible(tensor, name)
            sizes = [rows // self.size] * self.size
        sizes = list(_several(sizes, f"{name}_split_sizes"))
        if not all(_is_int(size) and size >= 0 for size in sizes):
            raise InvalidArgument(f"{name}_split_sizes: expected {self.size} integers from 0, got {sizes}")
        if len(sizes) != self.size or sum(sizes) != rows:
            raise InvalidArgument(
                f"{name}_split_sizes: expected {self.size} sizes that sum to dim 0 of {name} ({rows}), "
                f"got {sizes} (sum {sum(sizes)})"
            )
        sizes = [int(size) for size in sizes]
        width = tensor.numel() // rows if rows else 0
        return tuple(size * width for size in sizes)

    def _divisible(self, tensor: torch.Tensor, name: str) -> None:
        rows = tensor.shape[0] if tensor.ndim else 1
        if rows % self.size:
            raise InvalidArgument(
                f"{name}: dim 0 is {rows}, which does not divide by {self.size} ranks; pass split sizes"
            )

    @staticmethod
    def _expect(holds: bool, name: str, tensor: torch.Tensor, what: str, other: torch.Tensor) -> None:
        if not holds:
            raise InvalidArgument(
                f"{name}: shape {list(tensor.shape)} does not fit {what} of shape {list(other.shape)}"
            )


class Batch(Communicator):
    """A communicator whose operations are checked and kept, and issued once all are known to be good.

    `ready` may be shared by batches of several groups.
    """

    def __init__(self, communicator: Communicator, ready: list[Callable[[], Work | None]]) -> None:
        self.__dict__.update(vars(communicator))
        self._ready = ready

    def _go(self, plan: Plan, message: Message, copy_out: Callable[[], None] | None) -> None:
        self._ready.append(partial(Communicator._go, self, plan, message, copy_out))

    def issue(self) -> list[Work]:
        """Issue them in order; they must be asynchronous."""
        return [work for start in self._ready if (work := start()) is not None]


class Recipe(Communicator):
    """A communicator whose operations are prepared and kept instead of issued."""

    call: Call

    def __init__(self, communicator: Communicator) -> None:
        self.__dict__.update(vars(communicator))
        self._plans = {}

    def _go(self, plan: Plan, message: Message, copy_out: Callable[[], None] | None) -> None:
        assert copy_out is None, "persistent operations take contiguous tensors"
        self.call = Call(plan.issue, message)


def _in_place(plan: Plan, async_op: bool) -> Callable[[torch.Tensor], Work | None]:
    """What a repeated call comes down to: a message, and the bound chain."""
    signature, issue = plan.signature, plan.issue
    direct: Callable[[Message], None] | None = getattr(issue, "run", None)
    if direct is not None:

        def run(x: torch.Tensor) -> None:
            both = (x,)
            direct(Message(signature, both, both))

        return run
    if async_op:
        hold: Callable[[torch.Tensor], Work] | None = getattr(issue, "hold", None)
        return hold or (lambda x: issue(Message(signature, (x,), (x,))))
    return lambda x: issue(Message(signature, (x,), (x,))).wait()


def _reduce_op(op: Any) -> ReduceOp | None:
    """Our name of a reduce op; torch.distributed's are understood too."""
    if op is None or op in REDUCE_OPS:
        return op  # type: ignore[no-any-return]
    name = str(op).rpartition(".")[2]
    if name in REDUCE_OPS and type(op).__module__.startswith("torch."):
        return name
    raise InvalidArgument(f"op: {unknown('reduce op', op, REDUCE_OPS)}")


def _same_dtype(a: torch.Tensor, b: torch.Tensor, name: str = "output") -> None:
    if a.dtype != b.dtype or a.device != b.device:
        raise InvalidArgument(
            f"{name}: {dtype_name(a.dtype)} on {a.device} does not fit {dtype_name(b.dtype)} on {b.device}"
        )


def _space(outputs: Sequence[torch.Tensor], packed: bool) -> tuple[torch.Tensor | None, bool]:
    if not outputs:
        return None, False
    if packed and len(outputs) > 1:
        return pack_space(outputs)
    target = plain_like(outputs[0])
    return target, target is not outputs[0]


def _assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.copy_(value)


def _assign_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, value in pairs:
        tensor.copy_(value)


def _trailing(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape[1:])


def _counts(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.numel() for tensor in tensors)


def _pairs(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if len(outputs) != len(inputs):
        raise InvalidArgument(f"outputs: expected as many as inputs ({len(inputs)}), got {len(outputs)}")
    return list(zip(outputs, inputs, strict=True))


def _several(values: Any, name: str) -> Sequence[Any]:
    """The list that an argument must be."""
    if isinstance(values, (torch.Tensor, str)) or not isinstance(values, Sequence):
        raise InvalidArgument(f"{name}: expected a list, got {type(values).__name__}")
    return values


def _is_int(value: object) -> bool:
    """Whether `value` is an integer; NumPy's are, truth values are not."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _check_options(op: object, backend: object, compress: object, tag: object) -> None:
    """Raise `InvalidArgument` for options of a wrong type."""
    if op is not None:
        _reduce_op(op)
    for name, value in (("backend", backend), ("tag", tag)):
        if value is not None and not isinstance(value, str):
            raise InvalidArgument(f"{name}: expected a string or None, got {value!r}")
    if not (compress is None or compress is False or isinstance(compress, (str, Mapping))):
        raise InvalidArgument(
            f"compress: expected None, False, a codec's name or a mapping, got {compress!r}"
        )
    if isinstance(compress, Mapping) and not all(isinstance(key, str) for key in compress):
        raise InvalidArgument(f"compress: expected names of options as keys, got {list(compress)}")


def _match_tag(tag: int) -> int:
    if not _is_int(tag) or not 0 <= tag < 2**24:
        raise InvalidArgument(
            f"tag: expected an integer from 0 to {2**24 - 1}, got {tag!r} (a name goes into label=)"
        )
    return tag
