"""Operations of a group, one method each. `mcr_plus.<name>` documents them in full."""

# Long because each operation has a method with its own arguments.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from mcr_plus.communicator import calls
from mcr_plus.communicator.calls import CallOptions, Compress, MessageOptions, Tensors, Unpack
from mcr_plus.communicator.fast_calls import native_run
from mcr_plus.communicator.prepared import Prepared, repeated
from mcr_plus.communicator.tensors import ArrayOnDevice, as_tensor
from mcr_plus.core.kinds import ReduceOp, Sums
from mcr_plus.core.work import Work
from mcr_plus.engine.group_runtime import SIGNATURES
from mcr_plus.errors import InvalidArgument

if TYPE_CHECKING:
    from mcr_plus.communicator.arrays import PreparedArrays
    from mcr_plus.communicator.communicator import Communicator
    from mcr_plus.communicator.open_group import OpenGroup
    from mcr_plus.core.group import Group

PLANS: Final = 4 * SIGNATURES
"""Most plans of a group: several per signature, shared by calls with different arguments, such as tags."""


@dataclass(eq=False, repr=False)
class P2POp:
    """One send or receive of a batch: `P2POp(mcr.isend, tensor, peer, group=None, tag=0)`."""

    op: Callable[..., Any]
    tensor: Tensor
    peer: int
    group: Communicator | None = None
    tag: int = 0


class Operations(ABC):
    """Collectives, sends and receives of a group: argument checks, and a fast path for repeated calls."""

    opened: OpenGroup
    _group: Group
    _plans: dict[Any, Any]  # bound operations by call arguments: functions here, `BoundChain` in `prepared`
    _fast: Any  # the same in compiled code, or None; see `fast_calls`

    @abstractmethod
    def prepared(self, call: calls.Call, async_op: bool, options: CallOptions) -> Prepared:
        """Bind a call and lay out its tensors, without issuing it."""

    # -- collectives ------------------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = "SUM",
        async_op: bool = False,
        *,
        backend: str | None = None,
        compress: Compress = None,
        tag: str | None = None,
        sums: Sums | None = None,
    ) -> Work | None:
        """Reduce `tensor` over all ranks, in place. See `mcr.all_reduce`."""
        # An inlined copy of `_call`, because this is the most frequent operation.
        if self._fast is not None:
            work = self._fast("all_reduce", tensor, op, async_op, backend, compress, tag, sums)
            if work is not NotImplemented:
                return work  # type: ignore[no-any-return]
        key: tuple[Any, ...] | None = None
        try:
            key = (
                tensor.dtype, tensor.shape, tensor.is_cpu or tensor.device, tensor.is_contiguous(), op,
                async_op, backend, compress, tag, sums, tensor.requires_grad, tensor.is_neg(),
            )  # fmt: skip
            run = self._plans[key]
        except KeyError:
            pass
        except (TypeError, AttributeError, RuntimeError):
            key = None
        else:
            return run(tensor)  # type: ignore[no-any-return]
        options: CallOptions = {"backend": backend, "compress": compress, "tag": tag, "sums": sums}
        rest = (op, async_op, backend, compress, tag, sums)
        return _issued(self._learned("all_reduce", (tensor,), (op,), async_op, options, key, rest), async_op)

    def broadcast(
        self, tensor: Tensor, src: int, async_op: bool = False, **options: Unpack[CallOptions]
    ) -> Work | None:
        """Copy `tensor` of rank `src` into `tensor` of every rank. See `mcr.broadcast`."""
        if self._fast is not None and not options:  # `_call` does the same, and takes longer
            work = self._fast("broadcast", tensor, src, async_op)
            if work is not NotImplemented:
                return work  # type: ignore[no-any-return]
        return self._call("broadcast", (tensor,), (src,), async_op, options)

    def reduce(
        self,
        tensor: Tensor,
        dst: int,
        op: ReduceOp = "SUM",
        async_op: bool = False,
        **options: Unpack[CallOptions],
    ) -> Work | None:
        """Reduce `tensor` over all ranks into that of rank `dst`. See `mcr.reduce`."""
        if self._fast is not None and not options:  # `_call` does the same, and takes longer
            work = self._fast("reduce", tensor, dst, op, async_op)
            if work is not NotImplemented:
                return work  # type: ignore[no-any-return]
        return self._call("reduce", (tensor,), (dst, op), async_op, options)

    def all_gather_into_tensor(
        self, output: Tensor, input: Tensor, async_op: bool = False, **options: Unpack[CallOptions]
    ) -> Work | None:
        """Gather every rank's `input` into `output`, in rank order. See `mcr.all_gather_into_tensor`."""
        if self._fast is not None and not options:  # `_call` does the same, and takes longer
            work = self._fast("all_gather_into_tensor", output, input, async_op)
            if work is not NotImplemented:
                return work  # type: ignore[no-any-return]
        return self._call("all_gather_into_tensor", (output, input), (), async_op, options)

    def all_gather(
        self, tensor_list: Tensors, tensor: Tensor, async_op: bool = False, **options: Unpack[CallOptions]
    ) -> Work | None:
        """Gather every rank's `tensor` into `tensor_list`, all of the same size. See `mcr.all_gather`."""
        return _listed(self, "all_gather", (tensor_list, tensor), (), async_op, options)

    def all_gather_v(
        self, tensor_list: Tensors, tensor: Tensor, async_op: bool = False, **options: Unpack[CallOptions]
    ) -> Work | None:
        """Gather tensors that differ along dim 0 into `tensor_list`. See `mcr.all_gather_v`."""
        return self._issue(calls.all_gather_v, (tensor_list, tensor), async_op, options)

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,
        op: ReduceOp = "SUM",
        async_op: bool = False,
        **options: Unpack[CallOptions],
    ) -> Work | None:
        """Reduce `input` over all ranks; rank r gets part r in `output`. See `mcr.reduce_scatter_tensor`."""
        if self._fast is not None and not options:  # `_call` does the same, and takes longer
            work = self._fast("reduce_scatter_tensor", output, input, op, async_op)
            if work is not NotImplemented:
                return work  # type: ignore[no-any-return]
        return self._call("reduce_scatter_tensor", (output, input), (op,), async_op, options)

    def reduce_scatter(
        self,
        output: Tensor,
        input_list: Tensors,
        op: ReduceOp = "SUM",
        async_op: bool = False,
        **options: Unpack[CallOptions],
    ) -> Work | None:
        """Reduce `input_list[r]` over all ranks into `output` of rank r. See `mcr.reduce_scatter`."""
        return _listed(self, "reduce_scatter", (output, input_list), (op,), async_op, options)

    def reduce_scatter_v(
        self,
        output: Tensor,
        input_list: Tensors,
        op: ReduceOp = "SUM",
        async_op: bool = False,
        **options: Unpack[CallOptions],
    ) -> Work | None:
        """Reduce parts that differ along dim 0, as `reduce_scatter`. See `mcr.reduce_scatter_v`."""
        return self._issue(calls.reduce_scatter_v, (output, input_list, op), async_op, options)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
        **options: Unpack[CallOptions],
    ) -> Work | None:
        """Send part r of `input` to rank r and receive parts into `output`. See `mcr.all_to_all_single`."""
        if output_split_sizes is None and input_split_sizes is None:
            if self._fast is not None and not options:
                work = self._fast("all_to_all_single", output, input, async_op)
                if work is not NotImplemented:
                    return work  # type: ignore[no-any-return]
            return self._call("all_to_all_single", (output, input), (), async_op, options)
        arguments = (output, input, output_split_sizes, input_split_sizes)
        return self._issue(calls.all_to_all_single, arguments, async_op, options)

    def all_to_all(
        self,
        output_list: Tensors,
        input_list: Tensors,
        async_op: bool = False,
        **options: Unpack[CallOptions],
    ) -> Work | None:
        """Send `input_list[r]` to rank r and receive from it into `output_list[r]`. See `mcr.all_to_all`."""
        return self._issue(calls.all_to_all, (output_list, input_list), async_op, options)

    def gather(
        self,
        tensor: Tensor,
        gather_list: Tensors | None = None,
        dst: int = 0,
        async_op: bool = False,
        **options: Unpack[CallOptions],
    ) -> Work | None:
        """Gather the ranks' tensors into `gather_list` of rank `dst`. See `mcr.gather`."""
        return _listed(self, "gather", (gather_list, tensor), (dst,), async_op, options)

    def gather_v(
        self,
        tensor: Tensor,
        gather_list: Tensors | None = None,
        dst: int = 0,
        async_op: bool = False,
        **options: Unpack[CallOptions],
    ) -> Work | None:
        """Gather tensors of different sizes along dim 0 on rank `dst`. See `mcr.gather_v`."""
        return self._issue(calls.gather_v, (tensor, gather_list, dst), async_op, options)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: Tensors | None = None,
        src: int = 0,
        async_op: bool = False,
        **options: Unpack[CallOptions],
    ) -> Work | None:
        """Send `scatter_list[r]` of rank `src` into `tensor` of rank r. See `mcr.scatter`."""
        return _listed(self, "scatter", (tensor, scatter_list), (src,), async_op, options)

    def scatter_v(
        self,
        tensor: Tensor,
        scatter_list: Tensors | None = None,
        src: int = 0,
        async_op: bool = False,
        **options: Unpack[CallOptions],
    ) -> Work | None:
        """Scatter tensors of different sizes along dim 0 from rank `src`. See `mcr.scatter_v`."""
        return self._issue(calls.scatter_v, (tensor, scatter_list, src), async_op, options)

    def barrier(
        self, async_op: bool = False, *, backend: str | None = None, tag: str | None = None
    ) -> Work | None:
        """Wait until every rank has called `barrier`. See `mcr.barrier`."""
        if self._fast is not None:
            work = self._fast("barrier", async_op, "backend", "tag", backend, tag)
            if work is not NotImplemented:
                return work  # type: ignore[no-any-return]
        return self._call("barrier", (), (), async_op, {"backend": backend, "tag": tag})

    # -- coalesced --------------------------------------------------------------------------------

    def all_reduce_coalesced(
        self, tensors: Tensors, op: ReduceOp = "SUM", async_op: bool = False, **options: Unpack[CallOptions]
    ) -> Work | None:
        """Run `all_reduce` on each tensor, under one handle. See `mcr.all_reduce_coalesced`."""
        try:
            values = [as_tensor(tensor, "tensor") for tensor in calls.sequence_of(tensors, "tensors")]
        except ArrayOnDevice:
            again = partial(self.all_reduce_coalesced, op=op, async_op=True, **options)
            return self._on_arrays(again, (tensors,), async_op)
        return self.opened.coalesced.issue(self, "all_reduce", values, values, async_op, options, op)

    def all_gather_coalesced(
        self, outputs: Tensors, inputs: Tensors, async_op: bool = False, **options: Unpack[CallOptions]
    ) -> Work | None:
        """Run `all_gather_into_tensor` on each pair, under one handle. See `mcr.all_gather_coalesced`."""
        pairs = calls.pairs(outputs, inputs)
        try:
            built = [calls.all_gather_into_tensor(self._group, *pair) for pair in pairs]
        except ArrayOnDevice:
            again = partial(self.all_gather_coalesced, async_op=True, **options)
            return self._on_arrays(again, (outputs, inputs), async_op)
        sources, targets = [call.inputs[0] for call in built], [call.outputs[0] for call in built]
        return self.opened.coalesced.issue(self, "all_gather", sources, targets, async_op, options)

    def reduce_scatter_coalesced(
        self,
        outputs: Tensors,
        inputs: Tensors,
        op: ReduceOp = "SUM",
        async_op: bool = False,
        **options: Unpack[CallOptions],
    ) -> Work | None:
        """Run `reduce_scatter_tensor` on each pair, under one handle. See `mcr.reduce_scatter_coalesced`."""
        pairs = calls.pairs(outputs, inputs)
        try:
            built = [calls.reduce_scatter_tensor(self._group, *pair) for pair in pairs]
        except ArrayOnDevice:
            again = partial(self.reduce_scatter_coalesced, op=op, async_op=True, **options)
            return self._on_arrays(again, (outputs, inputs), async_op)
        sources, targets = [call.inputs[0] for call in built], [call.outputs[0] for call in built]
        return self.opened.coalesced.issue(self, "reduce_scatter", sources, targets, async_op, options, op)

    # -- point to point ---------------------------------------------------------------------------

    def send(self, tensor: Tensor, dst: int, tag: int = 0, **options: Unpack[MessageOptions]) -> None:
        """Send `tensor` to rank `dst`; returns when the program may change it. See `mcr.send`."""
        if self._fast is None or options or self._fast("send", tensor, dst, tag, False) is NotImplemented:
            self._call("send", (tensor,), (dst, tag), False, _labelled(options))

    def recv(
        self, tensor: Tensor, src: int | None = None, tag: int = 0, **options: Unpack[MessageOptions]
    ) -> None:
        """Receive into `tensor` from rank `src`, or from any rank. See `mcr.recv`."""
        if self._fast is None or options or self._fast("recv", tensor, src, tag, False) is NotImplemented:
            self._call("recv", (tensor,), (src, tag), False, _labelled(options))

    def isend(self, tensor: Tensor, dst: int, tag: int = 0, **options: Unpack[MessageOptions]) -> Work:
        """Start a send; `label` is its name in rules and logs. See `mcr.isend`."""
        if self._fast is not None and not options:
            work = self._fast("isend", tensor, dst, tag, True)
            if work is not NotImplemented:
                return work  # type: ignore[no-any-return]
        return self._call("isend", (tensor,), (dst, tag), True, _labelled(options))  # type: ignore[return-value]

    def irecv(
        self, tensor: Tensor, src: int | None = None, tag: int = 0, **options: Unpack[MessageOptions]
    ) -> Work:
        """Start a receive; `Work.source_rank()` returns the sender. See `mcr.irecv`."""
        if self._fast is not None and not options:
            work = self._fast("irecv", tensor, src, tag, True)
            if work is not NotImplemented:
                return work  # type: ignore[no-any-return]
        return self._call("irecv", (tensor,), (src, tag), True, _labelled(options))  # type: ignore[return-value]

    def batch_isend_irecv(self, p2p_ops: Sequence[P2POp]) -> list[Work]:
        """Start several sends and receives. See `mcr.batch_isend_irecv`."""
        starts: list[Callable[[], Any]] = []
        for index, operation in enumerate(calls.sequence_of(p2p_ops, "p2p_ops")):
            if not isinstance(operation, P2POp):
                raise InvalidArgument(f"p2p_ops[{index}]: expected a P2POp, got {type(operation).__name__}")
            name = getattr(operation.op, "__name__", "")
            if name not in ("isend", "irecv"):
                raise InvalidArgument(
                    f"p2p_ops[{index}].op: expected mcr.isend or mcr.irecv, got {operation.op!r}"
                )
            if not (operation.group is None or isinstance(operation.group, Operations)):
                raise InvalidArgument(
                    f"p2p_ops[{index}].group: expected a Communicator or None, got {operation.group!r}"
                )
            comm = operation.group or self
            starts.append(_start_of(comm, name, operation.tensor, (operation.peer, operation.tag)))
        return [start() for start in starts]

    # -- issuing ----------------------------------------------------------------------------------

    def _call(
        self,
        name: str,
        tensors: tuple[Tensor, ...],
        own: tuple[Any, ...],
        async_op: bool,
        options: CallOptions,
    ) -> Work | None:
        """Issue an operation on single tensors; a repeated call runs the operation bound earlier.

        `name`: the name of the method. `own`: its arguments after the tensors.
        """
        rest: tuple[Any, ...] = ()
        if self._fast is not None:
            rest = (*own, async_op, *options, *options.values())
            work = self._fast(name, *tensors, *rest)
            if work is not NotImplemented:
                return work  # type: ignore[no-any-return]
        key: tuple[Any, ...] | None = None
        try:
            facts = [fact for tensor in tensors for fact in _facts(tensor)]
            key = (name, own, async_op, *options.items(), *facts)
            run = self._plans[key]
        except KeyError:
            pass
        except (TypeError, AttributeError, RuntimeError):  # an unhashable option, or not a dense tensor
            key = None
        else:
            return run(*tensors)  # type: ignore[no-any-return]
        return _issued(self._learned(name, tensors, own, async_op, options, key, rest), async_op)

    def _learned(
        self,
        name: str,
        tensors: tuple[Tensor, ...],
        own: tuple[Any, ...],
        async_op: bool,
        options: CallOptions,
        key: tuple[Any, ...] | None,
        rest: tuple[Any, ...],
    ) -> Prepared | PreparedArrays:
        """Check and bind an operation.

        If calls can repeat it, its bound form is cached by `key`, and by `rest` (all arguments but tensors).
        """
        ready = self._ready(calls.BUILDERS[name], (*tensors, *own), async_op, options)
        if key is not None and isinstance(ready, Prepared):
            run = repeated(ready, tensors, async_op)
            if run is not None:
                if len(self._plans) >= PLANS:
                    self.opened.forget_plans()
                self._plans[key] = run
                if self._fast is not None and not self._fast.is_full():
                    native = None if async_op else native_run(ready)
                    self._fast.learn(run, native, name, tensors, rest)
        return ready

    def _issue(
        self, build: calls.Builder, arguments: tuple[Any, ...], async_op: bool, options: CallOptions
    ) -> Work | None:
        return _issued(self._ready(build, arguments, async_op, options), async_op)

    def _ready(
        self, build: calls.Builder, arguments: tuple[Any, ...], async_op: bool, options: CallOptions
    ) -> Prepared | PreparedArrays:
        """Check and bind an operation; device arrays of other libraries get a stream of their own."""
        try:
            call = build(self._group, *arguments)
        except ArrayOnDevice:
            return self.opened.arrays.prepared(
                arguments, lambda *lent: self.prepared(build(self._group, *lent), async_op, options)
            )
        return self.prepared(call, async_op, options)

    def _on_arrays(self, call: Callable[..., Any], arguments: tuple[Any, ...], async_op: bool) -> Work | None:
        """Issue coalesced operations by `call`, under the stream of their arrays if there are any."""
        loan = self.opened.arrays.loan(arguments)
        work = self.opened.arrays.started(loan, partial(call, *loan.arguments))
        if async_op:
            return work
        work.wait()
        return None


def _issued(ready: Prepared | PreparedArrays, async_op: bool) -> Work | None:
    return ready.start() if async_op else ready.run()


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    """Properties of a tensor that a bound operation depends on; `device` takes longer than `is_cpu`."""
    return (
        tensor.dtype, tensor.shape, tensor.is_cpu or tensor.device, tensor.is_contiguous(),
        tensor.requires_grad, tensor.is_neg(),
    )  # fmt: skip


def _start_of(group: Operations, name: str, tensor: Tensor, own: tuple[Any, ...]) -> Callable[[], Any]:
    """Check and bind an asynchronous operation on one tensor, or find its bound form; it starts later."""
    key: tuple[Any, ...] | None = None
    try:
        key = (name, own, True, *_facts(tensor))
        return partial(group._plans[key], tensor)
    except KeyError:
        pass
    except (TypeError, AttributeError, RuntimeError):  # an unhashable option, or not a dense tensor
        key = None
    return group._learned(name, (tensor,), own, True, {}, key, (*own, True)).start


def _listed(
    group: Operations,
    name: str,
    tensors: tuple[Any, Any],
    own: tuple[Any, ...],
    async_op: bool,
    options: CallOptions,
) -> Work | None:
    """Issue an operation on a list of equal tensors, which compiled code repeats where it can.

    `tensors`: output and input, of which one is the list, or None except on the root. `own`: the method's
    arguments after them.
    """
    target, source = tensors
    given = tensors if target is not None and source is not None else (source if target is None else target,)
    fast = None if async_op else group._fast
    rest = (*own, *options, *options.values())
    if fast is not None:
        work = fast(name, *given, *rest)
        if work is not NotImplemented:
            return work  # type: ignore[no-any-return]

    def ready(both: Sequence[Any]) -> Prepared | PreparedArrays:
        arguments = reversed(both) if name == "gather" else both
        return group._ready(calls.BUILDERS[name], (*arguments, *own), async_op, options)

    first, filled = ready(tensors), [each is not None for each in tensors]
    if fast is not None and isinstance(first, Prepared) and _is_repeatable(first, given, rest):
        native = native_run(first)

        def again(*given: Any) -> None:
            left = iter(given)
            ready([next(left) if each else None for each in filled]).run()

        if native is not None:
            fast.learn(again, native, name, given, rest)
    return _issued(first, async_op)


def _is_repeatable(ready: Prepared, given: tuple[Any, ...], rest: tuple[Any, ...]) -> bool:
    """Return whether compiled code finds such a call again, and the tensors are used where they are."""
    message = ready.message
    used = {tensor.data_ptr() for tensor in (*message.outputs, *message.inputs)}
    firsts = [each[0] if isinstance(each, (list, tuple)) else each for each in given]
    return (
        ready.copy_out is None
        and all(isinstance(each, Tensor) and each.data_ptr() in used for each in firsts)
        and not any(tensor.is_complex() for tensor in (*message.inputs, *message.outputs))
        and all(each is None or type(each) in (bool, int, str) for each in rest)
    )


def _labelled(options: MessageOptions) -> CallOptions:
    """Return the options of a message as call options: `label` becomes `tag`."""
    renamed: dict[str, Any] = dict(options)
    if "label" in renamed:
        renamed["tag"] = renamed.pop("label")
    return renamed  # type: ignore[return-value]
