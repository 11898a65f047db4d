"""MPI's nonblocking calls for collectives: function and arguments for each kind.

`Collectives` has one method per kind, with the name of the kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from mcr_plus.backends.base import Poll, Start
from mcr_plus.backends.emulation import divide
from mcr_plus.backends.mpi.datatypes import mpi_datatype, mpi_op
from mcr_plus.core.group import Group
from mcr_plus.core.kinds import REDUCING
from mcr_plus.core.message import Message, Signature

SPECS: Final = 4096  # buffer descriptions kept per bound operation


def datatype_of(signature: Signature) -> Any:
    """Return the MPI_Datatype of the elements of an operation."""
    assert signature.dtype is not None
    return mpi_datatype(signature.dtype)


def op_of(signature: Signature) -> Any:
    """Return the MPI_Op of a reduction; see `mpi_op`."""
    assert signature.dtype is not None
    assert signature.reduce_op is not None
    return mpi_op(signature.reduce_op, signature.dtype)


class Collectives:
    """Calls of a group's collectives, on the communicator given to `bind`."""

    def __init__(self, mpi: Any, group: Group) -> None:
        self._mpi = mpi
        self._group = group

    def bind(self, signature: Signature, comm: Any) -> Start:
        """Return the start of operations with a signature on a communicator; AVG divides the results."""
        binder: Callable[[Signature, Any], Start] = getattr(self, f"_{signature.kind}")
        start = binder(signature, comm)
        return self.divided(start, signature) if signature.reduce_op == "AVG" else start

    # -- arguments ----------------------------------------------------------------------------------

    def arguments(self, signature: Signature, message: Message) -> list[Any]:
        """Return the arguments of the MPI collective for tensors with fixed addresses."""
        if signature.kind == "barrier":
            return []
        spec = self.spec(signature)
        source = [spec(tensor) for tensor in message.inputs]
        target = [spec(tensor) for tensor in message.outputs]
        in_place = message.inputs and message.outputs and message.inputs[0] is message.outputs[0]
        if signature.kind == "broadcast":
            return [target[0], signature.root]
        first = self._mpi.IN_PLACE if in_place else source[0]
        if signature.kind in REDUCING:
            return [first, target[0], op_of(signature)]
        return [first, target[0]]

    def spec(self, signature: Signature) -> Callable[[torch.Tensor], list[Any]]:
        """Return a function tensor → mpi4py buffer description; cached, as making one is expensive."""
        datatype, from_address = datatype_of(signature), self._mpi.buffer.fromaddress
        known: dict[tuple[int, int], list[Any]] = {}

        def describe(tensor: torch.Tensor) -> list[Any]:
            key = (tensor.data_ptr(), tensor.numel())
            spec = known.get(key)
            if spec is None:
                if len(known) >= SPECS:
                    known.clear()
                # No count: mpi4py would take it as elements per rank in gathers and exchanges.
                spec = known[key] = [from_address(key[0], key[1] * tensor.element_size()), datatype]
            return spec

        return describe

    def _fixed_spec(self, signature: Signature) -> Callable[[torch.Tensor], list[Any]]:
        """Return `spec` for tensors whose size the signature fixes."""
        datatype, from_address = datatype_of(signature), self._mpi.buffer.fromaddress
        nbytes = signature.nbytes or 0
        known: dict[int, list[Any]] = {}

        def describe(tensor: torch.Tensor) -> list[Any]:
            address = tensor.data_ptr()
            spec = known.get(address)
            if spec is None:
                if len(known) >= SPECS:
                    known.clear()
                spec = known[address] = [from_address(address, nbytes), datatype]
            return spec

        return describe

    def divided(self, start: Start, signature: Signature) -> Start:
        """Wrap the start of a SUM so that the result is divided by the number of ranks."""
        size = self._group.size
        divides = signature.root is None or signature.root == self._group.rank

        def start_and_divide(message: Message) -> Poll:
            poll = start(message)
            if not divides:
                return poll
            out = message.outputs[0]

            def finish() -> bool:
                if not poll():
                    return False
                divide(out, size)
                return True

            return finish

        return start_and_divide

    # -- one for each kind ----------------------------------------------------------------------------

    def _all_reduce(self, signature: Signature, comm: Any) -> Start:
        op = op_of(signature)
        spec, call, in_place = self._fixed_spec(signature), comm.Iallreduce, self._mpi.IN_PLACE

        def start(message: Message) -> Poll:
            value, out = message.inputs[0], message.outputs[0]
            poll: Poll = call(in_place if out is value else spec(value), spec(out), op).Test
            return poll

        return start

    def _reduce(self, signature: Signature, comm: Any) -> Start:
        spec, op = self.spec(signature), op_of(signature)
        call, in_place, root = comm.Ireduce, self._mpi.IN_PLACE, signature.root
        is_root = self._group.rank == root

        def start(message: Message) -> Poll:
            value, out = message.inputs[0], message.outputs[0]
            if not is_root:
                poll: Poll = call(spec(value), None, op, root).Test
            else:
                poll = call(in_place if out is value else spec(value), spec(out), op, root).Test
            return poll

        return start

    def _reduce_scatter(self, signature: Signature, comm: Any) -> Start:
        spec, op = self.spec(signature), op_of(signature)
        call = comm.Ireduce_scatter_block

        def start(message: Message) -> Poll:
            poll: Poll = call(spec(message.inputs[0]), spec(message.outputs[0]), op).Test
            return poll

        return start

    def _reduce_scatter_v(self, signature: Signature, comm: Any) -> Start:
        spec, op = self.spec(signature), op_of(signature)
        call = comm.Ireduce_scatter

        def start(message: Message) -> Poll:
            counts = list(message.input_counts or ())
            poll: Poll = call(spec(message.inputs[0]), spec(message.outputs[0]), counts, op).Test
            return poll

        return start

    def _broadcast(self, signature: Signature, comm: Any) -> Start:
        spec, root, call = self.spec(signature), signature.root, comm.Ibcast

        def start(message: Message) -> Poll:
            poll: Poll = call(spec(message.outputs[0]), root).Test
            return poll

        return start

    def _all_gather(self, signature: Signature, comm: Any) -> Start:
        return self._moved(signature, comm.Iallgather)

    def _all_to_all(self, signature: Signature, comm: Any) -> Start:
        return self._moved(signature, comm.Ialltoall)

    def _moved(self, signature: Signature, call: Callable[..., Any]) -> Start:
        spec = self.spec(signature)

        def start(message: Message) -> Poll:
            poll: Poll = call(spec(message.inputs[0]), spec(message.outputs[0])).Test
            return poll

        return start

    def _all_gather_v(self, signature: Signature, comm: Any) -> Start:
        spec, datatype, call = self.spec(signature), datatype_of(signature), comm.Iallgatherv

        def start(message: Message) -> Poll:
            target = _parts(spec, message.outputs[0], message.output_counts, datatype)
            poll: Poll = call(spec(message.inputs[0]), target).Test
            return poll

        return start

    def _all_to_all_v(self, signature: Signature, comm: Any) -> Start:
        spec, datatype, call = self.spec(signature), datatype_of(signature), comm.Ialltoallv

        def start(message: Message) -> Poll:
            source = _parts(spec, message.inputs[0], message.input_counts, datatype)
            target = _parts(spec, message.outputs[0], message.output_counts, datatype)
            poll: Poll = call(source, target).Test
            return poll

        return start

    def _gather(self, signature: Signature, comm: Any) -> Start:
        spec, root, call = self.spec(signature), signature.root, comm.Igather
        is_root = self._group.rank == root

        def start(message: Message) -> Poll:
            target = spec(message.outputs[0]) if is_root else None
            poll: Poll = call(spec(message.inputs[0]), target, root).Test
            return poll

        return start

    def _gather_v(self, signature: Signature, comm: Any) -> Start:
        spec, root, call = self.spec(signature), signature.root, comm.Igatherv
        is_root, datatype = self._group.rank == root, datatype_of(signature)

        def start(message: Message) -> Poll:
            target = _parts(spec, message.outputs[0], message.output_counts, datatype) if is_root else None
            poll: Poll = call(spec(message.inputs[0]), target, root).Test
            return poll

        return start

    def _scatter(self, signature: Signature, comm: Any) -> Start:
        spec, root, call = self.spec(signature), signature.root, comm.Iscatter
        is_root = self._group.rank == root

        def start(message: Message) -> Poll:
            source = spec(message.inputs[0]) if is_root else None
            poll: Poll = call(source, spec(message.outputs[0]), root).Test
            return poll

        return start

    def _scatter_v(self, signature: Signature, comm: Any) -> Start:
        spec, root, call = self.spec(signature), signature.root, comm.Iscatterv
        is_root, datatype = self._group.rank == root, datatype_of(signature)

        def start(message: Message) -> Poll:
            source = _parts(spec, message.inputs[0], message.input_counts, datatype) if is_root else None
            poll: Poll = call(source, spec(message.outputs[0]), root).Test
            return poll

        return start

    def _barrier(self, signature: Signature, comm: Any) -> Start:  # noqa: ARG002 - binders share a shape
        call = comm.Ibarrier

        def start(message: Message) -> Poll:  # noqa: ARG001
            poll: Poll = call().Test
            return poll

        return start


def _parts(
    spec: Callable[[torch.Tensor], list[Any]],
    tensor: torch.Tensor,
    counts: tuple[int, ...] | None,
    datatype: Any,
) -> list[Any]:
    """Return buffer, counts and (implied, dense) displacements."""
    return [spec(tensor)[0], list(counts or ()), None, datatype]
