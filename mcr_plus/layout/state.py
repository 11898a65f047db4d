"""Many tensors from their layouts to others, bound once: the state of a model for other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from mcr_plus.communicator.calls import CallOptions, Compress
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.communicator.tensors import as_tensor, check_apart, is_plain, overlap, plain
from mcr_plus.core.kinds import DTYPES, dtype_name
from mcr_plus.core.units import about, parse_size
from mcr_plus.core.work import JointWork, Work
from mcr_plus.errors import InvalidArgument, NotInitialized, Unsupported, short
from mcr_plus.layout.collective import Collective
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.mover import TAG, Mover
from mcr_plus.layout.plan import Plan, Spec, make_plan
from mcr_plus.runtime.init import member_of

State = Mapping[str, Any]
_Dtypes = tuple[torch.dtype, ...]
_Named = tuple[list[str], Mover | Collective]
"""What runs the redistribution of some tensors, with their names."""
_WRONG: Final = 1 << 20
"""In place of a dtype where a rank's arguments are wrong."""


class RedistributionWork(JointWork):
    """The handle of a redistribution in flight.

    `outputs`: this rank's local tensors in the target by name, None where it has no part; complete once it is
        done.
    """

    __slots__ = ("outputs",)

    outputs: dict[str, torch.Tensor | None]

    @property
    def output(self) -> torch.Tensor | None:
        """The output of a single tensor."""
        (output,) = self.outputs.values()
        return output


class _Local(NamedTuple):
    """A tensor on this rank: as it is sent, as it is received, and where the result belongs if elsewhere."""

    source: torch.Tensor | None
    output: torch.Tensor | None
    final: torch.Tensor | None
    given: torch.Tensor | None


class Redistribution:
    """Tensors of a state between two sets of layouts; the result of `mcr.redistribution`.

    Calling it is collective over the group. The plan is made in the first call, for the dtypes of its
    tensors.
    """

    def __init__(
        self,
        specs: Mapping[str, tuple[Layout, Layout]],
        *,
        memory: int | str | None = "256MiB",
        group: Communicator | None = None,
        tag: str | None = None,
        compress: Compress = None,
    ) -> None:
        self._comm = member_of(group)
        self._specs = dict(specs)
        for name, pair in self._specs.items():
            if not (
                isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(each, Layout) for each in pair)
            ):
                raise InvalidArgument(
                    f"specs[{name!r}]: expected (source, target), two layouts, got {short(pair)}"
                )
        same: dict[Layout, Layout] = {}  # equal layouts are one object, whose regions are computed once
        for name, (source, target) in self._specs.items():
            self._specs[name] = (same.setdefault(source, source), same.setdefault(target, target))
        self._memory = None if memory is None else _memory(memory, self._specs)
        self._options: CallOptions = {"tag": tag, "compress": compress}
        self._bound: dict[_Dtypes, tuple[list[Plan], list[_Named]]] = {}
        self._latest: list[Plan] = []
        self.rank = self._comm.ranks[self._comm.rank] if self._comm.rank >= 0 else -1
        members = set(self._comm.ranks)
        self._asks = any(members - set(source.ranks) for source, _ in self._specs.values())
        """Whether some rank may have to be told the dtype of a tensor."""

    def __call__(self, source: State, target: State | None = None) -> dict[str, torch.Tensor | None]:
        """Bring the tensors of `source` to `target`; return those of the target.

        Args:
            source: this rank's local tensors by name, in their source layouts; None or left out where it has
                no part.
            target: local tensors to write to; those that are None or left out are made.
        """
        movers, locals_ = self._ready(source, target)
        for names, mover in movers:
            rows = [locals_[name] for name in names]
            mover.run([row.source for row in rows], [row.output for row in rows], self._options)
        for row in locals_.values():
            if row.final is not None:
                row.final.copy_(row.output)  # type: ignore[arg-type]
        return {name: row.given for name, row in locals_.items()}

    def start(self, source: State, target: State | None = None) -> RedistributionWork:
        """As a call, without waiting: returns a handle, whose `outputs` are complete once it is done.

        The tensors of `source` must not be changed before that.
        """
        movers, locals_ = self._ready(source, target)
        works: list[Work] = []
        nbytes = 0
        for names, mover in movers:
            rows = [locals_[name] for name in names]
            size = sum(each.nbytes for row in rows for each in (row.source, row.output) if each is not None)
            nbytes += size
            works.append(
                mover.start([row.source for row in rows], [row.output for row in rows], self._options, size)
            )
        joint = RedistributionWork(works, TAG, nbytes=nbytes, tag=self._options.get("tag"))
        joint.outputs = {name: row.given for name, row in locals_.items()}
        strided = [row for row in locals_.values() if row.final is not None]
        if strided:
            joint.then(lambda: _write_back(strided))
        return joint

    def prepare(self, dtypes: Sequence[torch.dtype], wrong: str | None = None) -> list[Plan]:
        """Make the plans for tensors of these dtypes, in the order of the specs, before the first call.

        Collective. `wrong`: what is wrong with this rank's tensors, for which all ranks raise
        `InvalidArgument`.
        """
        key = tuple(dtypes)
        self._bound[key] = self._plan(key, wrong)
        return self._bound[key][0]

    def shape_of_source(self, name: str) -> tuple[int, ...] | None:
        """The shape of this rank's local tensor in the source; None where it has no part."""
        return self._specs[name][0].local_shape(self.rank)

    @property
    def plan(self) -> Plan:
        """The plan of the last call, for all tensors of a dtype; see `plans` for several dtypes."""
        plans = self.plans
        if len(plans) != 1:
            raise NotInitialized(
                f"there are {len(plans)} plans, one for each dtype, after the first call; see `plans`"
            )
        return plans[0]

    @property
    def plans(self) -> list[Plan]:
        """The plans of the last call, one for each dtype."""
        return list(self._latest)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that are kept for the next call."""
        return sum(mover.buffer_bytes for _, movers in self._bound.values() for _, mover in movers)

    def release(self) -> None:
        """Free the buffers that are kept for the next call."""
        for _, movers in self._bound.values():
            for _, mover in movers:
                mover.release()

    # -- binding ----------------------------------------------------------------------------------

    def _ready(self, source: State, target: State | None) -> tuple[list[_Named], dict[str, _Local]]:
        """The movers for the dtypes of these tensors, and the tensors. Raises on all ranks alike in a first
        call; in later ones, as any collective, on those whose arguments are wrong.
        """
        if self.rank < 0:
            raise Unsupported(f"this rank is not a member of group '{self._comm.name}'")
        if self._comm.closed:
            raise NotInitialized(f"group '{self._comm.name}' is closed")
        wrong: str | None = None
        given: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        try:
            given = self._checked(source, target or {})
        except (InvalidArgument, Unsupported) as error:
            wrong = str(error)
        if wrong is not None and self._bound and not self._asks:
            raise InvalidArgument(wrong)
        dtypes, wrong = self._dtypes(given, wrong)
        if dtypes not in self._bound or wrong is not None:
            self._bound[dtypes] = self._plan(dtypes, wrong)
        self._latest, movers = self._bound[dtypes]
        device = next((each.device for pair in given.values() for each in pair if each is not None), None)
        locals_ = {
            name: self._local(name, *given[name], dtype, device or torch.device("cpu"))
            for name, dtype in zip(self._specs, dtypes, strict=True)
        }
        return movers, locals_

    def _checked(
        self, source: State, target: State
    ) -> dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]:
        for what, state in (("source", source), ("target", target)):
            if not isinstance(state, Mapping):
                raise InvalidArgument(
                    f"{what}: expected a mapping of names to tensors, got {type(state).__name__}"
                )
        given = {}
        for name, (before, after) in self._specs.items():
            x = _checked_local(source.get(name), before, self.rank, name, "source")
            out = _checked_local(target.get(name), after, self.rank, name, "target")
            if x is not None and out is not None and x.dtype != out.dtype:
                raise InvalidArgument(
                    f"{_at(name)}the target's tensor has dtype {dtype_name(out.dtype)}, "
                    f"the source's {dtype_name(x.dtype)}"
                )
            given[name] = (x, out)
        return given

    def _dtypes(
        self, given: Mapping[str, tuple[torch.Tensor | None, torch.Tensor | None]], wrong: str | None
    ) -> tuple[tuple[torch.dtype, ...], str | None]:
        """The dtype of each tensor, of ranks that have none of it too."""
        if wrong is None and not self._asks:  # all ranks have a part in every source
            return tuple(x.dtype for x, _ in given.values() if x is not None), None
        codes = []
        for name in self._specs:
            known = [each for each in given.get(name, ()) if each is not None]
            codes.append(DTYPES.index(known[0].dtype) if known else -1)
        if wrong is not None:
            codes = [_WRONG] * len(codes)
        if self._asks and self._comm.size > 1 and codes:
            most = torch.tensor([*codes, *(-code if code >= 0 else -_WRONG for code in codes)])
            self._comm.all_reduce(most, "MAX", compress=False, tag=TAG)
            found = most.tolist()
            largest, smallest = found[: len(codes)], [-code for code in found[len(codes) :]]
            for name, low, high in zip(self._specs, smallest, largest, strict=True):
                if wrong is None and high < _WRONG and low != high:
                    wrong = f"{_at(name)}ranks pass tensors of different dtypes"
            codes = largest
            if wrong is None and max(codes) == _WRONG:
                return (torch.float32,) * len(codes), ""
        return tuple(DTYPES[code if 0 <= code < len(DTYPES) else 0] for code in codes), wrong

    def _plan(self, dtypes: _Dtypes, wrong: str | None) -> tuple[list[Plan], list[_Named]]:
        """A plan for the tensors of each dtype, and what runs them."""
        tag, compress = self._options.get("tag"), self._options.get("compress")
        lossy = compress not in (None, False)
        if isinstance(compress, Mapping):
            compress = dict(sorted(compress.items(), key=str))
        said = f"memory={self._memory}, tag={tag!r}, compress={compress!r}"
        plans: list[Plan] = []
        movers: list[_Named] = []
        for dtype in dict.fromkeys(dtypes):
            names = [name for name, each in zip(self._specs, dtypes, strict=True) if each == dtype]
            specs = [Spec(name, *self._specs[name], dtype) for name in names]
            plan = make_plan(self._comm, specs, wrong, lossy=lossy, options=said)
            plans.append(plan)
            movers += self._movers_of(plan)
        return plans, movers

    def _movers_of(self, plan: Plan) -> list[_Named]:
        """What runs a plan: the exchanges of most tensors, and the native collectives of some."""
        found: list[_Named] = []
        exchanged = plan.take(
            [index for index, each in enumerate(plan.chosen) if each.program.native is None]
        )
        if exchanged.specs:
            names = [spec.name for spec in exchanged.specs]
            found.append((names, Mover(self._comm, exchanged, self._memory)))
        for spec, each in zip(plan.specs, plan.chosen, strict=True):
            if each.program.native is not None:
                found.append(([spec.name], Collective(self._comm, spec, each.program.native, plan.call)))
        return found

    def _local(
        self,
        name: str,
        x: torch.Tensor | None,
        out: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> _Local:
        shape = self._specs[name][1].local_shape(self.rank)
        result = out
        if shape is not None and (out is None or not is_plain(out)):
            result = torch.empty(shape, dtype=dtype, device=device if out is None else out.device)
        if x is not None:
            x = plain(x)
            if result is not None and overlap(x, result):
                x = x.clone()
        return _Local(x, result, out if out is not result else None, out if out is not None else result)


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
        specs: by name the layouts (source, target) of each tensor, the same on all ranks of the group.
        memory: bytes of the buffers of a call (`256MiB`); beyond it tensors travel in rounds, of which one is
            packed while another is on its way. None: everything at once. The addends of a tensor that is to
            be summed are not cut, so they may take more.
        group, tag, compress: as of `mcr.redistribute`.

    Returns:
        A callable: `move(source_state, target_state)` writes the target's local tensors and returns them,
        `move.start(…)` returns a `Work`, `move.plan` is the plan after the first call. It may be called again
        with tensors of the same dtypes; other dtypes make another plan.

    Raises:
        InvalidArgument: layouts do not fit each other or the group, or `memory` is less than the largest row.

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


def _checked_local(value: Any, layout: Layout, rank: int, name: str, what: str) -> torch.Tensor | None:
    """A local tensor of the right shape; None where the rank has no part in the layout. `what`: its side."""
    shape = layout.local_shape(rank)
    where = f"{_at(name)}{what}"
    if value is None:
        if shape is not None and what == "source":
            raise InvalidArgument(
                f"{where} {layout}: expected this rank's local tensor of shape {list(shape)}, got None"
            )
        return None
    if shape is None:
        raise InvalidArgument(
            f"{where} {layout}: this rank has no part in it; expected None, got {_described(value)}"
        )
    if hasattr(value, "to_local"):
        raise InvalidArgument(
            f"{where} {layout}: expected this rank's local tensor, got a {type(value).__name__}; pass its "
            "to_local()"
        )
    if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(
            f"{where} {layout}: the tensor requires gradients; use mcr_plus.autograd.redistribute, or pass "
            "tensor.detach()"
        )
    tensor = as_tensor(value, where)
    if tuple(tensor.shape) != shape:
        raise InvalidArgument(
            f"{where} {layout}: expected a local tensor of shape {list(shape)}, got {_described(tensor)}"
        )
    if what == "target":
        try:
            check_apart(tensor)
        except InvalidArgument as error:
            raise InvalidArgument(f"{where} {layout}: {error}") from None
    return tensor


def _described(value: Any) -> str:
    return f"one of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _at(name: str) -> str:
    return f"{name}: " if name else ""


def _memory(memory: int | str, specs: Mapping[str, tuple[Layout, Layout]]) -> int:
    try:
        limit = parse_size(memory)
    except ValueError as error:
        raise InvalidArgument(f"memory: {error}") from None
    rows = {name: source.shape[-1] if len(source.shape) > 1 else 1 for name, (source, _) in specs.items()}
    widest = max(rows, key=rows.__getitem__, default=None)
    # Two rounds in flight, each of a row that is sent and one that is received, of the largest dtype.
    if widest is not None and limit < 4 * 16 * rows[widest]:
        raise InvalidArgument(
            f"memory: {about(limit)} is less than the largest row needs, {about(4 * 16 * rows[widest])} "
            f"for {rows[widest]} elements of {widest or 'the tensor'}: buffers of two rounds, sent and "
            "received, of up to 16 bytes an element"
        )
    return limit


def _write_back(locals_: Sequence[_Local]) -> None:
    for row in locals_:
        row.final.copy_(row.output)  # type: ignore[union-attr, arg-type]
