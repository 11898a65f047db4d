"""Argument checks of operations: one function per kind, each returning a `Call`.

These functions do not communicate, copy or bind. Ranks in arguments are ranks of the whole job; ranks in a
`Call` are ranks of the group.
"""
# ruff: noqa: D103 - each function has the arguments of the `Communicator` method of the same name

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypedDict

import torch

from mcr_plus.communicator.tensors import as_tensor
from mcr_plus.core.kinds import MESSAGES, REDUCE_OPS, REDUCING, SUMS, Kind, ReduceOp, Sums, dtype_name
from mcr_plus.core.units import whole_number, whole_numbers
from mcr_plus.errors import InvalidArgument, unknown

if sys.version_info >= (3, 11):
    from typing import Unpack as Unpack
else:
    from typing_extensions import Unpack as Unpack

if TYPE_CHECKING:
    from mcr_plus.core.group import Group
    from mcr_plus.core.message import Extras

Tensors = Sequence[torch.Tensor]
Compress = str | Mapping[str, object] | bool | None


class CallOptions(TypedDict, total=False):
    """Keywords of every collective.

    backend: the name of the library that runs the operation; None lets the select stage choose.
    compress: a codec's name, a mapping with `codec` and its options, False, or None: the pipeline decides.
    tag: a freely chosen name, matched by rules and shown in logs.
    sums: of operations that add: "fast", "fixed", "exact", or None: the configuration decides.
    """

    backend: str | None
    compress: Compress
    tag: str | None
    sums: Sums | None


class MessageOptions(TypedDict, total=False):
    """Keywords of sends and receives: as in `CallOptions`, but `label` in place of `tag`.

    The `tag` of a message is an integer that must be equal on both sides.
    """

    backend: str | None
    compress: Compress
    label: str | None


class Call(NamedTuple):
    """One operation on this rank, with checked arguments.

    Attributes:
        inputs, outputs: the tensors as the caller passed them.
        packed: True if a list of tensors is sent as one.
        shape: see `Signature`.
        numel: the payload in elements; None if it differs between ranks.
        root: a rank of the group.
        reduce_op: the reduce op as the caller passed it.
        extras: the extras of the message.
        parts, key, called, counts_agreed: see `Signature`; `called` is its `call`.
    """

    kind: Kind
    inputs: Tensors
    outputs: Tensors
    shape: Sequence[int]
    numel: int | None
    root: int | None = None
    reduce_op: ReduceOp | None = None
    packed: bool = False
    extras: Extras | None = None
    parts: tuple[tuple[int, ...], ...] | None = None
    key: str | None = None
    called: str | None = None
    counts_agreed: bool = False

    @property
    def like(self) -> torch.Tensor | None:
        """Tensor of the operation's dtype and device; None for a barrier."""
        first = self.inputs or self.outputs
        return first[0] if first else None


# -- one function per kind ------------------------------------------------------------------------


def all_reduce(group: Group, tensor: torch.Tensor, op: ReduceOp = "SUM") -> Call:  # noqa: ARG001
    value = as_tensor(tensor, "tensor")
    return Call("all_reduce", (value,), (value,), value.shape, value.numel(), reduce_op=op)


def broadcast(group: Group, tensor: torch.Tensor, src: int) -> Call:
    value = as_tensor(tensor, "tensor")
    return Call(
        "broadcast", (value,), (value,), value.shape, value.numel(), root=group_rank(group, src, "src")
    )


def reduce(group: Group, tensor: torch.Tensor, dst: int, op: ReduceOp = "SUM") -> Call:
    value = as_tensor(tensor, "tensor")
    root = group_rank(group, dst, "dst")
    target = value if root == group.rank else torch.empty(0, dtype=value.dtype, device=value.device)
    return Call("reduce", (value,), (target,), value.shape, value.numel(), root, op)


def all_gather_into_tensor(group: Group, output: torch.Tensor, input: torch.Tensor) -> Call:
    target, source = as_tensor(output, "output"), as_tensor(input, "input")
    _expect(target.numel() == source.numel() * group.size, "output", target, f"{group.size} × input", source)
    _same_dtype(target, source)
    return Call("all_gather", (source,), (target,), source.shape, target.numel())


def all_gather(group: Group, tensor_list: Tensors, tensor: torch.Tensor) -> Call:
    value = as_tensor(tensor, "tensor")
    parts = _list(group, tensor_list, "tensor_list", like=value, same_size=True)
    return Call("all_gather", (value,), parts, value.shape, value.numel() * group.size, packed=True)


def all_gather_v(group: Group, tensor_list: Tensors, tensor: torch.Tensor) -> Call:
    value = as_tensor(tensor, "tensor")
    parts = _list(group, tensor_list, "tensor_list", like=value)
    own = parts[group.rank]
    _expect(own.numel() == value.numel(), f"tensor_list[{group.rank}]", own, "tensor", value)
    counts: Extras = {"output_counts": _counts(parts)}
    return Call("all_gather_v", (value,), parts, _trailing(value), None, packed=True, extras=counts)


def reduce_scatter_tensor(
    group: Group, output: torch.Tensor, input: torch.Tensor, op: ReduceOp = "SUM"
) -> Call:
    target, source = as_tensor(output, "output"), as_tensor(input, "input")
    _expect(source.numel() == target.numel() * group.size, "input", source, f"{group.size} × output", target)
    _same_dtype(target, source)
    return Call("reduce_scatter", (source,), (target,), target.shape, source.numel(), reduce_op=op)


def reduce_scatter(group: Group, output: torch.Tensor, input_list: Tensors, op: ReduceOp = "SUM") -> Call:
    target = as_tensor(output, "output")
    parts = _list(group, input_list, "input_list", like=target, same_size=True)
    numel = target.numel() * group.size
    return Call("reduce_scatter", parts, (target,), target.shape, numel, reduce_op=op, packed=True)


def reduce_scatter_v(group: Group, output: torch.Tensor, input_list: Tensors, op: ReduceOp = "SUM") -> Call:
    target = as_tensor(output, "output")
    parts = _list(group, input_list, "input_list", like=target)
    own = parts[group.rank]
    _expect(own.numel() == target.numel(), f"input_list[{group.rank}]", own, "output", target)
    counts: Extras = {"input_counts": _counts(parts)}
    return Call(
        "reduce_scatter_v", parts, (target,), _trailing(target), None, None, op, packed=True, extras=counts
    )


def all_to_all_single(
    group: Group,
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> Call:
    target, source = as_tensor(output, "output"), as_tensor(input, "input")
    _same_dtype(target, source)
    if output_split_sizes is None and input_split_sizes is None:
        _expect(target.numel() == source.numel(), "output", target, "input", source)
        _divisible(group, source, "input")
        return Call("all_to_all", (source,), (target,), source.shape, source.numel())
    _expect(_trailing(target) == _trailing(source), "output", target, "the rows of input", source)
    counts: Extras = {
        "output_counts": _split_counts(group, target, output_split_sizes, "output"),
        "input_counts": _split_counts(group, source, input_split_sizes, "input"),
    }
    return Call("all_to_all_v", (source,), (target,), _trailing(source), None, extras=counts)


def all_to_all(group: Group, output_list: Tensors, input_list: Tensors) -> Call:
    targets = _list(group, output_list, "output_list")
    sources = _list(group, input_list, "input_list", like=targets[0])
    counts: Extras = {"input_counts": _counts(sources), "output_counts": _counts(targets)}
    return Call("all_to_all_v", sources, targets, (), None, packed=True, extras=counts)


def gather(group: Group, tensor: torch.Tensor, gather_list: Tensors | None = None, dst: int = 0) -> Call:
    value, root = as_tensor(tensor, "tensor"), group_rank(group, dst, "dst")
    parts = _root_list(group, gather_list, "gather_list", root, value, same_size=True)
    return Call("gather", (value,), parts, value.shape, value.numel() * group.size, root, packed=True)


def gather_v(group: Group, tensor: torch.Tensor, gather_list: Tensors | None = None, dst: int = 0) -> Call:
    value, root = as_tensor(tensor, "tensor"), group_rank(group, dst, "dst")
    parts = _root_list(group, gather_list, "gather_list", root, value)
    counts: Extras = {"output_counts": _counts(parts)}
    return Call("gather_v", (value,), parts, _trailing(value), None, root, packed=True, extras=counts)


def scatter(group: Group, tensor: torch.Tensor, scatter_list: Tensors | None = None, src: int = 0) -> Call:
    value, root = as_tensor(tensor, "tensor"), group_rank(group, src, "src")
    parts = _root_list(group, scatter_list, "scatter_list", root, value, same_size=True)
    return Call("scatter", parts, (value,), value.shape, value.numel() * group.size, root, packed=True)


def scatter_v(group: Group, tensor: torch.Tensor, scatter_list: Tensors | None = None, src: int = 0) -> Call:
    value, root = as_tensor(tensor, "tensor"), group_rank(group, src, "src")
    parts = _root_list(group, scatter_list, "scatter_list", root, value)
    counts: Extras = {"input_counts": _counts(parts)}
    return Call("scatter_v", parts, (value,), _trailing(value), None, root, packed=True, extras=counts)


def barrier(group: Group) -> Call:  # noqa: ARG001
    return Call("barrier", (), (), (), 0)


def isend(group: Group, tensor: torch.Tensor, dst: int, tag: int = 0) -> Call:
    value = as_tensor(tensor, "tensor")
    extras: Extras = {"peer": group_rank(group, dst, "dst"), "match_tag": _match_tag(tag)}
    return Call("send", (value,), (), value.shape, value.numel(), extras=extras)


def irecv(group: Group, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> Call:
    value = as_tensor(tensor, "tensor")
    peer = None if src is None else group_rank(group, src, "src")
    extras: Extras = {"peer": peer, "match_tag": _match_tag(tag)}
    return Call("recv", (), (value,), value.shape, value.numel(), extras=extras)


Builder = Callable[..., Call]
"""Type of this module's functions: arguments of an operation to a `Call`."""

BUILDERS: Final[Mapping[str, Builder]] = {
    build.__name__: build
    for build in (
        all_reduce, broadcast, reduce, all_gather_into_tensor, all_gather, all_gather_v,
        reduce_scatter_tensor, reduce_scatter, reduce_scatter_v, all_to_all_single, all_to_all, gather,
        gather_v, scatter, scatter_v, barrier, isend, irecv,
    )
} | {"send": isend, "recv": irecv}  # fmt: skip
"""The function that builds the `Call` of each method of `Communicator`."""


# -- checks ---------------------------------------------------------------------------------------


def group_rank(group: Group, rank: int, name: str) -> int:
    """Return the group rank of a rank of the whole job.

    Raises `InvalidArgument` if the rank is not a member; `name`: the argument's name in the text.
    """
    number = whole_number(rank)
    local = None if number is None else group.local.get(number)
    if local is None:
        raise InvalidArgument(
            f"{name}: rank {rank!r} is not in group '{group.name}'; its ranks{group.of_job}: "
            f"{list(group.ranks)}"
        )
    return local


def sequence_of(values: Any, name: str) -> Sequence[Any]:
    """Return `values` if it is a list or tuple. Raises `InvalidArgument` otherwise."""
    if isinstance(values, (torch.Tensor, str)) or not isinstance(values, Sequence):
        raise InvalidArgument(f"{name}: expected a list, got {type(values).__name__}")
    return values


def pairs(outputs: Tensors, inputs: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of an output and its input. Raises `InvalidArgument` if the lists differ in length."""
    if len(outputs) != len(inputs):
        raise InvalidArgument(f"outputs: expected as many as inputs ({len(inputs)}), got {len(outputs)}")
    return list(zip(outputs, inputs, strict=True))


_OTHER_NAMES: Final[Mapping[str, ReduceOp]] = {
    "MEAN": "AVG", "AVERAGE": "AVG", "ADD": "SUM", "MUL": "PRODUCT", "AND": "BAND", "OR": "BOR",
}  # fmt: skip


def reduce_op_name(op: Any) -> ReduceOp | None:
    """Return the name of a reduce op, given by name or as a `ReduceOp` of torch.distributed."""
    if op is None or op in REDUCE_OPS:
        return op  # type: ignore[no-any-return]
    name = str(op).rpartition(".")[2]
    if name in REDUCE_OPS and type(op).__module__.startswith("torch."):
        return name
    meant = _OTHER_NAMES.get(str(op).upper())
    hint = f"; did you mean '{meant}'?" if meant else ""
    raise InvalidArgument(f"op: {unknown('reduce op', op, REDUCE_OPS)}{hint}")


def check_options(kind: Kind, op: object, options: Mapping[str, Any]) -> None:
    """Raise `TypeError` for unknown keywords, `InvalidArgument` for values of a wrong type."""
    known = MessageOptions if kind in MESSAGES else CallOptions
    if not options.keys() <= CallOptions.__annotations__.keys():
        names = ", ".join(sorted(options.keys() - CallOptions.__annotations__.keys()))
        raise TypeError(f"{kind}: unexpected keyword {names}; known: {', '.join(known.__annotations__)}")
    if op is not None:
        reduce_op_name(op)
    for name in ("backend", "tag"):
        value = options.get(name)
        if value is not None and not isinstance(value, str):
            raise InvalidArgument(f"{name}: expected a string or None, got {value!r}")
    if (sums := options.get("sums")) not in (None, *SUMS):
        raise InvalidArgument(f"sums: {unknown('order of additions', sums, SUMS)}")
    if sums is not None and kind not in REDUCING:
        raise InvalidArgument(f"sums: {kind} adds nothing; it is for {', '.join(sorted(REDUCING))}")
    compress = options.get("compress")
    if not (compress is None or compress is False or isinstance(compress, (str, Mapping))):
        raise InvalidArgument(
            f"compress: expected None, False, a codec's name or a mapping, got {compress!r}"
        )
    if isinstance(compress, Mapping) and not all(isinstance(key, str) for key in compress):
        raise InvalidArgument(f"compress: expected names of options as keys, got {list(compress)}")


def _list(
    group: Group, tensors: Tensors, name: str, *, like: torch.Tensor | None = None, same_size: bool = False
) -> tuple[torch.Tensor, ...]:
    """Return the tensors, one per rank, all with the dtype of `like` and, with `same_size`, its size."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise InvalidArgument(
            f"{name}: expected a list of {group.size} tensors, got {type(tensors).__name__}"
        )
    if len(tensors) != group.size:
        raise InvalidArgument(f"{name}: expected {group.size} tensors, one per rank, got {len(tensors)}")
    parts = tuple(as_tensor(tensor, f"{name}[{index}]") for index, tensor in enumerate(tensors))
    first = parts[0] if like is None else like
    for index, part in enumerate(parts):
        _same_dtype(part, first, f"{name}[{index}]")
        if same_size:
            _expect(part.numel() == first.numel(), f"{name}[{index}]", part, "the rank's own tensor", first)
    return parts


def _root_list(
    group: Group,
    tensors: Tensors | None,
    name: str,
    root: int,
    like: torch.Tensor,
    *,
    same_size: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return one tensor per rank on the root, none elsewhere. Raises `InvalidArgument` if they do not fit."""
    if root != group.rank:
        if tensors:
            raise InvalidArgument(f"{name}: only the root, {group.named(root)}, may pass it")
        return ()
    if tensors is None:
        raise InvalidArgument(f"{name}: expected {group.size} tensors on the root, got None")
    parts = _list(group, tensors, name, like=like, same_size=same_size)
    own = parts[group.rank]
    _expect(own.numel() == like.numel(), f"{name}[{group.rank}]", own, "tensor", like)
    return parts


def _split_counts(
    group: Group, tensor: torch.Tensor, sizes: Sequence[int] | None, name: str
) -> tuple[int, ...]:
    """Return the elements per rank of a tensor that is split along dim 0."""
    rows = tensor.shape[0] if tensor.ndim else 1
    if sizes is None:
        _divisible(group, tensor, name)
        sizes = [rows // group.size] * group.size
    given = list(sequence_of(sizes, f"{name}_split_sizes"))
    counts = whole_numbers(given)
    if counts is None or any(count < 0 for count in counts):
        raise InvalidArgument(f"{name}_split_sizes: expected {group.size} integers from 0, got {given}")
    if len(counts) != group.size or sum(counts) != rows:
        raise InvalidArgument(
            f"{name}_split_sizes: expected {group.size} sizes that sum to dim 0 of {name} ({rows}), "
            f"got {counts} (sum {sum(counts)})"
        )
    width = tensor.numel() // rows if rows else 0
    return tuple(count * width for count in counts)


def _divisible(group: Group, tensor: torch.Tensor, name: str) -> None:
    rows = tensor.shape[0] if tensor.ndim else 1
    if rows % group.size:
        raise InvalidArgument(
            f"{name}: dim 0 is {rows}, not divisible by {group.size} ranks; pass split sizes"
        )


def _expect(holds: bool, name: str, tensor: torch.Tensor, what: str, other: torch.Tensor) -> None:
    if not holds:
        raise InvalidArgument(
            f"{name}: shape {list(tensor.shape)} does not fit {what} of shape {list(other.shape)}"
        )


def _same_dtype(a: torch.Tensor, b: torch.Tensor, name: str = "output") -> None:
    if a.dtype != b.dtype or a.device != b.device:
        raise InvalidArgument(
            f"{name}: {dtype_name(a.dtype)} on {a.device} does not fit {dtype_name(b.dtype)} on {b.device}"
        )


def _trailing(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape[1:])


def _counts(tensors: Tensors) -> tuple[int, ...]:
    return tuple(tensor.numel() for tensor in tensors)


def _match_tag(tag: int) -> int:
    number = whole_number(tag)
    if number is None or not 0 <= number < 2**24:
        raise InvalidArgument(
            f"tag: expected an integer from 0 to {2**24 - 1}, got {tag!r} (a name goes into label=)"
        )
    return number
