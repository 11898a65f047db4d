"""Redistribute a tensor by a native collective in each of several disjoint groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mcr_plus.communicator.calls import BUILDERS
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.work import JointWork, Work
from mcr_plus.layout.native import GROUPS, root_of
from mcr_plus.layout.regions import as_ints
from mcr_plus.layout.rounds import Locals, Strided, copy_all, in_one_piece, strided
from mcr_plus.layout.run import TAG

if TYPE_CHECKING:
    from mcr_plus.communicator.calls import CallOptions
    from mcr_plus.core.kinds import ReduceOp
    from mcr_plus.layout.native import NativeCollective
    from mcr_plus.layout.plan import Spec


class CollectiveMover:
    """A native collective bound to its groups, for one tensor; has the interface of `Mover`.

    The constructor is collective over `comm`: it opens the groups on first use. `call`: see `Plan.call`.
    """

    def __init__(
        self, comm: Communicator, spec: Spec, native: NativeCollective, options: CallOptions, call: str
    ) -> None:
        rank = comm.ranks[comm.rank]
        self.rank = rank
        members = native.group_of(rank)
        self._kind = native.kind
        self._is_alone = members is not None and len(members) == 1
        self._call = call
        self._op: ReduceOp = spec.source.op
        self._group = _group(comm, native)
        self._options: CallOptions = {**options, "tag": options.get("tag") or TAG}
        # A codec could make replicas in different groups differ, and overwrite the source of a broadcast.
        if len(native.groups) > 1 or native.kind == "broadcast":
            self._options["compress"] = False
        self._parts: list[Strided] = []
        self._at: int | None = None
        self._buffer: torch.Tensor | None = None
        if members is not None and native.kind == "broadcast":
            self._root = root_of(members, spec.source)
        elif members is not None and not self._is_alone and native.kind != "all_reduce":
            outer, inner = spec.target, spec.source
            if native.kind == "reduce_scatter":
                outer, inner = inner, outer
            at = [int(inner.pieces(member)[0]) for member in members]
            pieces = as_ints([int(outer.pieces(rank)[0])] * len(at))
            self._parts = strided(0, *outer.strided(rank, pieces, inner.held.take(as_ints(at))))
            self._at = in_one_piece(self._parts)
            if self._at is None:
                size = self._parts[0].numel
                self._parts = [part._replace(at=index * size) for index, part in enumerate(self._parts)]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffer kept for the next call."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def release(self) -> None:
        """Free the buffer."""
        self._buffer = None

    def run(self, sources: Locals, outputs: Locals) -> None:
        """Run the collective, see `Mover.run`."""
        if self._is_alone:
            _copy_whole(sources, outputs)
        elif self._group is not None:
            _, finish = self._issue(self._group, sources, outputs, False)
            if finish is not None:
                finish()

    def start(self, sources: Locals, outputs: Locals, nbytes: int) -> Work:
        """Start the collective, see `Mover.start`."""
        works: list[Work] = []
        if self._is_alone:
            _copy_whole(sources, outputs)
        elif self._group is not None:
            work, finish = self._issue(self._group, sources, outputs, True)
            assert work is not None
            if finish is not None:
                work.then(finish)
            works.append(work)
        return JointWork(works, TAG, nbytes=nbytes, tag=self._options.get("tag"))

    def _issue(
        self, group: Communicator, sources: Locals, outputs: Locals, async_op: bool
    ) -> tuple[Work | None, Callable[[], None] | None]:
        (source,), (output,) = sources, outputs

        def issue(kind: str, *arguments: Any) -> Work | None:
            call = BUILDERS[kind](group.opened.group, *arguments)._replace(called=self._call)
            ready = group.prepared(call, async_op, self._options)
            if async_op:
                return ready.start()
            ready.run()
            return None

        if self._kind == "broadcast":
            if self._root != self.rank:
                assert output is not None
                return issue("broadcast", output.view(-1), self._root), None
            assert source is not None
            _copy_whole(sources, outputs)
            return issue("broadcast", source.view(-1), self._root), None
        assert source is not None
        assert output is not None
        flat, result = source.view(-1), output.view(-1)
        if self._kind == "all_reduce":
            result.copy_(flat)  # source and output may have different numbers of dimensions
            return issue("all_reduce", result, self._op), None
        if self._kind == "all_gather":
            if self._at is not None:
                return issue("all_gather_into_tensor", result, flat), None
            buffer = self._space(output)
            work = issue("all_gather_into_tensor", buffer, flat)
            return work, lambda: self._copy([part.of(output) for part in self._parts], buffer, out=True)
        if self._at is None:
            flat = self._space(source)
            self._copy([part.of(source) for part in self._parts], flat, out=False)
            kept = flat
            return issue("reduce_scatter_tensor", result, flat, self._op), lambda: self._keep(kept)
        return issue("reduce_scatter_tensor", result, flat, self._op), None

    def _space(self, like: torch.Tensor) -> torch.Tensor:
        """Return a buffer for all parts: the kept one, or a new one if a pending call uses it."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None and buffer.device == like.device:
            return buffer
        return torch.empty(like.numel(), dtype=like.dtype, device=like.device)

    def _keep(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def _copy(self, views: list[torch.Tensor], buffer: torch.Tensor, *, out: bool) -> None:
        parts = [part.within(buffer) for part in self._parts]
        if out:
            copy_all(views, parts)
            self._keep(buffer)
        else:
            copy_all(parts, views)


def _copy_whole(sources: Locals, outputs: Locals) -> None:
    for source, output in zip(sources, outputs, strict=True):
        if output is not None:  # the root of a broadcast may have no part in the target
            assert source is not None
            output.view(-1).copy_(source.view(-1))


def _group(comm: Communicator, native: NativeCollective) -> Communicator | None:
    """Return this rank's group; None without one. The first call opens it, collectively."""
    if native.groups == (comm.ranks,):
        return comm
    known: dict[tuple[tuple[int, ...], ...], Communicator | None]
    known = comm.attached.setdefault(GROUPS, {})
    if native.groups not in known:
        choices: dict[int, tuple[int | None, int]] = dict.fromkeys(comm.ranks, (None, 0))
        for index, members in enumerate(native.groups):
            if len(members) > 1:
                choices |= {rank: (index, key) for key, rank in enumerate(members)}
        if "unheard" in comm.attached:
            comm.attached["choices"] = list(choices.values())
        made = known[native.groups] = comm.split(*choices[comm.ranks[comm.rank]])
        if made is not None:
            made.opened.follows = False  # a new world gets other groups
    return known[native.groups]
