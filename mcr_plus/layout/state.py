"""Bind the redistribution of many tensors, for example a model's state (`mcr.redistribution`)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np
import torch

from mcr_plus.communicator.calls import CallOptions, Compress
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.kinds import DTYPES, dtype_name
from mcr_plus.core.streams import current_accelerator
from mcr_plus.core.units import about, parse_size
from mcr_plus.core.work import JointWork, Work
from mcr_plus.errors import InvalidArgument, McrError, NotInitialized, Unsupported, short
from mcr_plus.job.init import member_of
from mcr_plus.layout.agreement import agree_on_dtypes
from mcr_plus.layout.buffers import Chain, SpacePool
from mcr_plus.layout.collective import CollectiveMover
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.local import (
    Expected,
    Given,
    KnownLocals,
    Local,
    State,
    checked,
    local,
    made_apart,
    prefix,
)
from mcr_plus.layout.mover import Mover
from mcr_plus.layout.native import Room
from mcr_plus.layout.plan import RedistributionPlan, Spec, make_plan
from mcr_plus.layout.run import TAG

_Dtypes = tuple[torch.dtype, ...]
_Named = tuple[list[str], Mover | CollectiveMover]
"""Names of tensors, and the object that redistributes them."""
_Bound = tuple[list[RedistributionPlan], list[_Named]]


class RedistributionWork(JointWork):
    """Handle of a pending redistribution.

    `outputs`: this rank's local tensors in the target by name, None without a part; valid once the handle is
    complete.
    """

    __slots__ = ("outputs",)

    outputs: dict[str, torch.Tensor | None]

    @property
    def output(self) -> torch.Tensor | None:
        """Output tensor, if the redistribution has exactly one tensor."""
        (output,) = self.outputs.values()
        return output


class Redistribution:
    """Bound redistribution of a state's tensors: the result of `mcr.redistribution`.

    A call is collective over the group. The first call makes the plan for the dtypes of its tensors. A rank
    without a part in a tensor's source assumes the same dtypes in later calls. So before a call with other
    dtypes, all ranks must call `prepare`.
    """

    _other_dtypes = "call `prepare` with other dtypes on all ranks, or bind a redistribution for each"

    def __init__(
        self,
        specs: Mapping[str, tuple[Layout, Layout]],
        *,
        memory: int | str | None = "256MiB",
        group: Communicator | None = None,
        tag: str | None = None,
        compress: Compress = None,
        pool: SpacePool | None = None,
    ) -> None:
        """Bind, see `redistribution`. `pool`: buffers shared with others that have the same `memory`."""
        self._comm = member_of(group)
        if not isinstance(specs, Mapping):
            raise InvalidArgument(
                f"specs: expected a mapping of names to (source, target), got {type(specs).__name__}"
            )
        self._specs = dict(specs)
        for name, pair in self._specs.items():
            if not isinstance(name, str):
                raise InvalidArgument(f"specs: expected names, got {short(name)}")
            if not (
                isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(each, Layout) for each in pair)
            ):
                raise InvalidArgument(
                    f"specs[{name!r}]: expected (source, target), two layouts, got {short(pair)}"
                )
        same: dict[Layout, Layout] = {}  # one object for equal layouts, to compute regions once
        for name, (source, target) in self._specs.items():
            self._specs[name] = (same.setdefault(source, source), same.setdefault(target, target))
        self._memory = None if memory is None else _memory(memory, self._specs)
        self._pool = pool if pool or self._memory is None else SpacePool(is_single=True)
        self._options: CallOptions = {"tag": tag, "compress": compress}
        self._bound: dict[_Dtypes, _Bound] = {}
        self._known: tuple[_Bound, KnownLocals] | None = None
        self._latest: list[RedistributionPlan] | None = None
        self.rank = self._comm.ranks[self._comm.rank] if self._comm.rank >= 0 else -1
        members = set(self._comm.ranks)
        self._asks = any(members - set(source.ranks) for source, _ in self._specs.values())
        """True if a rank has no part in some source, so it may need the dtype from other ranks."""
        self._dtypes: _Dtypes | None = None
        """Dtypes that all ranks expect, if `_asks`."""
        self._device = torch.device("cpu")
        """Device of operations; on a rank without tensors, the device type of the other ranks' tensors."""

    def __call__(self, source: State, target: State | None = None) -> dict[str, torch.Tensor | None]:
        """Redistribute the tensors of `source`; returns the target's local tensors by name.

        Args:
            source: this rank's local tensors by name, in their source layouts; None or absent if it has no
                part. Names without layouts are ignored.
            target: local tensors to write to. Tensors that are None or absent are allocated, on the device of
                this rank's other tensors, or on the CPU without any. A name without layouts is an error.
                Sources that share memory with any target tensor are copied first.

        Raises:
            InvalidArgument: a tensor does not fit its layout, has a dtype that ranks without the tensor do
                not expect, or shares memory with another target tensor. The first call raises on all ranks,
                later ones on the ranks with invalid arguments.
        """
        movers, locals_ = self._ready(source, target)
        for names, mover in movers:
            rows = [locals_[name] for name in names]
            mover.run([row.source for row in rows], [row.output for row in rows])
        for row in locals_.values():
            if row.final is not None:
                row.final.copy_(row.output)  # type: ignore[arg-type]
        self._done()
        return {name: row.given for name, row in locals_.items()}

    def start(self, source: State, target: State | None = None) -> RedistributionWork:
        """Issue a call without waiting; returns a handle, whose `outputs` are valid once it is complete.

        Only the first call waits for other ranks. The tensors of `source` must not be changed before the
        handle is complete.
        """
        movers, locals_ = self._ready(source, target)
        works: list[Work] = []
        nbytes = 0
        chain = self._chain(movers, locals_)
        for names, mover in movers:
            rows = [locals_[name] for name in names]
            size = sum(each.nbytes for row in rows for each in (row.source, row.output) if each is not None)
            nbytes += size
            sources, outputs = [row.source for row in rows], [row.output for row in rows]
            if chain is not None and isinstance(mover, Mover):
                works.append(mover.start(sources, outputs, size, chain))
                chain.before = [works[-1]]
            else:
                works.append(mover.start(sources, outputs, size))
        joint = RedistributionWork(works, TAG, nbytes=nbytes, tag=self._options.get("tag"))
        joint.outputs = {name: row.given for name, row in locals_.items()}
        strided = [row for row in locals_.values() if row.final is not None]
        if strided:
            joint.then(lambda: _write_back(strided))
        if chain is not None:
            joint.then(chain.give_back)
        joint.then(self._done)
        return joint

    def prepare(
        self,
        dtypes: Sequence[torch.dtype],
        wrong: str | None = None,
        device: torch.device | str | None = None,
    ) -> list[RedistributionPlan]:
        """Make the plans for tensors of these dtypes, in the order of the specs, before the first call.

        Collective. Later calls expect these dtypes. `wrong`: the error in this rank's tensors, if any; all
        ranks then raise `InvalidArgument`. `device`: device of the tensors, for ranks without tensors; None:
        as in the previous call, or the CPU.
        """
        if device is not None:
            self._device = torch.device(device)
        key = tuple(dtypes)
        if len(key) != len(self._specs) or not all(isinstance(each, torch.dtype) for each in key):
            raise InvalidArgument(
                f"dtypes: expected {len(self._specs)}, one for each tensor, got {short(dtypes)}"
            )
        if key not in self._bound or wrong is not None:
            self._bind(key, wrong)
        if self._asks:
            self._dtypes = key
        self._known = None  # ranks without tensors cannot tell old dtypes from new ones
        self._latest = self._bound[key][0]
        return self._bound[key][0]

    def shape_of_source(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of this rank's local tensor in the source; None if it has no part."""
        return self._specs[name][0].local_shape(self.rank)

    @property
    def plan(self) -> RedistributionPlan:
        """Plan of the last call, for all tensors.

        Raises:
            NotInitialized: there has been no call.
        """
        plans = self.plans
        if len(plans) == 1:
            return plans[0]
        if self._latest is None:
            raise NotInitialized("the first call makes the plan, and there has been none")
        place = {name: number for number, name in enumerate(self._specs)}
        specs = [spec for plan in plans for spec in plan.specs]
        loads = np.concatenate([plan.loads for plan in plans] or [np.zeros((0, 0, 0), np.int64)])
        chosen = [each for plan in plans for each in plan.chosen]
        call = ", ".join(plan.call for plan in plans)
        joined = RedistributionPlan(specs, chosen, loads, plans[0].nodes if plans else None, call)
        return joined.take(sorted(range(len(specs)), key=lambda index: place[specs[index].name]))

    @property
    def plans(self) -> list[RedistributionPlan]:
        """Plans of the last call, one for each dtype."""
        return list(self._latest or ())

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that are kept for the next call."""
        used = 0 if self._pool is None else self._pool.nbytes
        for _, movers in self._bound.values():
            for _, mover in movers:
                if not (isinstance(mover, Mover) and mover.pool is self._pool):
                    used += mover.buffer_bytes
        return used

    def release(self) -> None:
        """Free the buffers that are kept for the next call."""
        for _, movers in self._bound.values():
            for _, mover in movers:
                mover.release()

    # -- binding ----------------------------------------------------------------------------------

    def _ready(self, source: State, target: State | None) -> tuple[list[_Named], dict[str, Local]]:
        """Return the movers for the dtypes of these tensors, and the tensors.

        Invalid arguments raise on all ranks in the first call. In later calls they raise only on the ranks
        that pass them, as in other collectives.
        """
        if self.rank < 0:
            raise Unsupported(f"this rank is not a member of group '{self._comm.name}'")
        if self._comm.closed:
            raise NotInitialized(f"group '{self._comm.name}' is closed")
        if self._known is not None:
            bound, known = self._known
            rows = known.rows(source, target)
            if rows is not None:
                self._latest, movers = bound
                return movers, rows
        wrong: str | None = None
        given: Given = {}
        try:
            given = checked(source, {} if target is None else target, self._specs, self.rank)
            self._check_dtypes(given)
        except (InvalidArgument, Unsupported) as error:
            wrong = str(error)
        device = next((each.device for pair in given.values() for each in pair if each is not None), None)
        if not self._bound:
            self._agree(wrong, device)
        elif wrong is not None:
            raise InvalidArgument(wrong)
        dtypes = self._dtypes or self._found_dtypes(given)
        if dtypes not in self._bound:
            self._bind(dtypes)
        if self._asks:
            self._dtypes = dtypes
        bound = self._bound[dtypes]
        self._latest, movers = bound
        device = self._device if device is None else device
        rows, expected = {}, []
        for (name, (before, after)), dtype in zip(self._specs.items(), dtypes, strict=True):
            shape = after.local_shape(self.rank)
            rows[name] = local(shape, *given[name], dtype, device)
            expected.append(Expected(name, dtype, before.local_shape(self.rank), shape))
        self._known = bound, KnownLocals(self._specs.keys(), device, expected)
        return movers, made_apart(rows)

    def _check_dtypes(self, given: Given) -> None:
        """Raise `InvalidArgument` if ranks without a tensor expect another dtype."""
        for (name, pair), dtype in zip(given.items(), self._dtypes or (), strict=False):
            for each in pair:
                if each is not None and each.dtype != dtype:
                    raise InvalidArgument(
                        f"{prefix(name)}got a tensor of {dtype_name(each.dtype)}, but ranks without a part "
                        f"in the source expect {dtype_name(dtype)}, the dtype of the call before; "
                        f"{self._other_dtypes}"
                    )

    def _agree(self, wrong: str | None, device: torch.device | None = None) -> None:
        """Raise on all ranks if any rank passes `wrong`, or if layouts or options differ between ranks.

        This precedes all other communication, so that ranks with invalid arguments take part, too. `device`:
        device of this rank's tensors; None without tensors, in which case other ranks determine it.
        """
        words = [self._said, *(f"{name}/{a.digest!r}/{b.digest!r}" for name, (a, b) in self._specs.items())]
        number = int.from_bytes(hashlib.blake2b("\n".join(words).encode(), digest_size=7).digest(), "big")
        on_device = device is not None and device.type != "cpu"
        facts = torch.tensor([number, -number, int(wrong is not None), int(on_device)], device="cpu")
        self._comm.all_reduce(facts, "MAX", compress=False, tag=TAG)
        *compared, some_on_device = facts.tolist()
        if on_device or (device is None and some_on_device):
            self._device = current_accelerator() if device is None else device
        if compared != [number, -number, 0]:
            specs = [Spec(name, *pair, torch.float32) for name, pair in self._specs.items()]
            make_plan(self._comm, specs, wrong, options=self._said)  # finds the difference, and raises
            raise InvalidArgument("ranks pass different layouts or options")

    def _found_dtypes(self, given: Given) -> _Dtypes:
        """Return the dtype of each tensor, even on ranks that do not hold it; collective if `_asks`."""
        if not self._asks:  # all ranks have a part in every source
            return tuple(x.dtype for x, _ in given.values() if x is not None)
        held = {
            name: next(each.dtype for each in pair if each is not None)
            for name, pair in given.items()
            if any(each is not None for each in pair)
        }
        codes = [DTYPES.index(held[name]) if name in held else -1 for name in self._specs]
        most = torch.tensor([*codes, *(-code if code >= 0 else -len(DTYPES) for code in codes)], device="cpu")
        self._comm.all_reduce(most, "MAX", compress=False, tag=TAG)
        found = most.tolist()
        largest, smallest = found[: len(codes)], [-code for code in found[len(codes) :]]
        dtypes = tuple(DTYPES[code] if code >= 0 else torch.get_default_dtype() for code in largest)
        if any(0 <= high != low for low, high in zip(smallest, largest, strict=True)):
            agree_on_dtypes(self._comm, held)  # finds the difference, and raises
        return dtypes  # if no rank holds a tensor, its ranks are outside the group: `make_plan` raises

    @property
    def _said(self) -> str:
        """Options of the call in the form that ranks compare."""
        compress = self._options.get("compress")
        if isinstance(compress, Mapping):
            compress = dict(sorted(compress.items(), key=str))
        return f"memory={self._memory}, tag={self._options.get('tag')!r}, compress={compress!r}"

    def _bind(self, dtypes: _Dtypes, wrong: str | None = None) -> None:
        """Make a plan for the tensors of each dtype, and the movers that run the plans."""
        lossy = self._options.get("compress") not in (None, False)
        room, memory = Room(self._comm, self._for_native()), self._memory
        among = [
            Spec(name, *pair, dtype) for (name, pair), dtype in zip(self._specs.items(), dtypes, strict=True)
        ]
        plans = [
            make_plan(
                self._comm,
                [spec for spec in among if spec.dtype == dtype],
                wrong,
                room=room,
                lossy=lossy,
                options=self._said,
                among=among,
            )
            for dtype in dict.fromkeys(dtypes)
        ]
        if memory is not None:
            memory -= room.used
        self._bound[dtypes] = plans, [each for plan in plans for each in self._movers_of(plan, memory)]

    def _for_native(self) -> int | None:
        """Return the limit of bytes for native collectives of all dtypes together; None: no limit.

        With several tensors, at most half of the memory, and no more than exchanges leave unused.
        """
        if self._memory is None or len(self._specs) == 1:
            return self._memory
        return max(0, min(self._memory // 2, self._memory - _needed(self._specs)[0]))

    def _movers_of(self, plan: RedistributionPlan, memory: int | None) -> list[_Named]:
        """Return the movers of a plan: one for exchanges (in `memory` bytes), one per native collective."""
        found: list[_Named] = []
        exchanged = plan.take(
            [index for index, each in enumerate(plan.chosen) if each.program.native is None]
        )
        if exchanged.specs:
            names = [spec.name for spec in exchanged.specs]
            found.append((names, self._mover(exchanged, memory)))
        for spec, each in zip(plan.specs, plan.chosen, strict=True):
            if each.program.native is not None:
                native = CollectiveMover(self._comm, spec, each.program.native, self._options, plan.call)
                found.append(([spec.name], native))
        return found

    def _mover(self, plan: RedistributionPlan, memory: int | None) -> Mover:
        return Mover(self._comm, plan, self._options, memory, self._pool, self._device)

    def _chain(self, movers: Sequence[_Named], locals_: Mapping[str, Local]) -> Chain | None:
        """Return one run that moves the dtypes in turn through a shared buffer; None without a bound."""
        sizes = [mover.nbytes for _, mover in movers if isinstance(mover, Mover)]
        if self._pool is None or len(sizes) < 2:
            return None
        tensors = (each for row in locals_.values() for each in (row.source, row.output) if each is not None)
        device = next((each.device for each in tensors), self._device)
        return Chain(self._pool, self._pool.take(max(sizes), device))

    def _done(self) -> None:
        """Do nothing. A subclass overrides this hook, which runs when the outputs of a call are complete."""


def refuse(group: Communicator | None, error: McrError) -> NoReturn:
    """Send an error to the other ranks, then raise it; other ranks raise it in their first call."""
    comm = member_of(group)
    if comm.rank >= 0 and not comm.closed:
        try:
            Redistribution({}, group=comm)._agree(str(error))
        except McrError:  # this rank's own error is more precise
            raise error from None
    raise error


def redistribution(
    specs: Mapping[str, tuple[Layout, Layout]],
    *,
    memory: int | str | None = "256MiB",
    group: Communicator | None = None,
    tag: str | None = None,
    compress: Compress = None,
) -> Redistribution:
    """Bind the redistribution of many tensors: `move = mcr.redistribution(specs); move(source_state,
    target_state)`.

    Args:
        specs: layouts (source, target) of each tensor by name, the same on all ranks of the group.
        memory: bound of the buffers of a call in bytes (`256MiB`), for all dtypes together. Larger exchanges
            are cut into rounds, so that one round is packed while another is in flight. None: no bound. Not
            included: addends of a summed tensor, which are not cut, and the slices and float32 sums made
                from them; copies of tensors that are not contiguous, and of sources that share memory with
                the target; and the memory of codecs and libraries.
        group, tag, compress: see `mcr.redistribute`.

    Returns:
        A callable: `move(source_state, target_state)` writes the target's local tensors and returns them,
        `move.start(…)` returns a `Work`, and `move.plan` is the plan after the first call. Later calls may
        pass tensors of the same dtypes. Other dtypes cause a new plan if every rank has a part in every
        source; otherwise all ranks must first call `move.prepare(dtypes)`.

    Raises:
        InvalidArgument: `memory` is too small for the largest row, or specs are not pairs of layouts; raised
            on the rank that passes them. In the first call, on all ranks: layouts do not match each other or
            the group.

    Example:
        ```python
        ranks = range(mcr.get_world_size())
        specs = {"w": (mcr.Layout.sharded((8, 4), ranks, 0), mcr.Layout.replicated((8, 4), ranks))}
        move = mcr.redistribution(specs, memory="64MiB")
        state = {"w": torch.ones(specs["w"][0].local_shape(mcr.get_rank()))}
        full = move(state)
        assert full["w"].shape == (8, 4)
        ```
    """
    return Redistribution(specs, memory=memory, group=group, tag=tag, compress=compress)


def _memory(memory: int | str, specs: Mapping[str, tuple[Layout, Layout]]) -> int:
    try:
        limit = parse_size(memory)
    except ValueError as error:
        raise InvalidArgument(f"memory: {error}") from None
    needed, widest, row = _needed(specs)
    if limit < needed:
        raise InvalidArgument(
            f"memory: {about(limit)} is less than the largest row needs, {about(needed)} "
            f"for {row} elements of {widest or 'the tensor'}: buffers of two rounds, sent and "
            "received, of up to 16 bytes an element"
        )
    return limit


def _needed(specs: Mapping[str, tuple[Layout, Layout]]) -> tuple[int, str, int]:
    """Return the minimum bytes for exchanges, the tensor with the largest row, and the row's elements."""
    rows = {name: source.shape[-1] if len(source.shape) > 1 else 1 for name, (source, _) in specs.items()}
    widest = max(rows, key=rows.__getitem__, default="")
    row = rows.get(widest, 0)
    # Two rounds in flight; each sends and receives a row of the largest dtype.
    return 4 * 16 * row, widest, row


def _write_back(locals_: Sequence[Local]) -> None:
    for row in locals_:
        row.final.copy_(row.output)  # type: ignore[union-attr, arg-type]
