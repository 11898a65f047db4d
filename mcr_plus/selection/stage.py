"""Stage `select`: chooses the library for an operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from mcr_plus import registry
from mcr_plus.backends import backend_class
from mcr_plus.backends.base import Support
from mcr_plus.config.names import names_no_algorithm
from mcr_plus.core.buffers import Pool
from mcr_plus.core.kinds import REDUCING, dtype_name
from mcr_plus.core.message import Signature
from mcr_plus.core.units import size_words
from mcr_plus.engine.options import DispatchOptions
from mcr_plus.errors import InvalidArgument, Unsupported
from mcr_plus.pipeline.stage import Context, Issue, Next, Stage
from mcr_plus.rendezvous.world import World
from mcr_plus.selection.options import SelectOptions
from mcr_plus.tables import BUILT_IN, EAGER, FOLDER

if TYPE_CHECKING:
    from mcr_plus.selection.online import Refinement
    from mcr_plus.tables.cost import CostModel, Estimate
    from mcr_plus.tables.table import Query, Table, TableRule

_ADDED_AS_THEY_ARE: Final = (torch.float32, torch.float64)
"""Dtypes whose sum of two values is the same over all libraries."""
# Inside a host, shared memory is the fastest, then MPI. Between hosts, MPI is faster, but for reductions from
# about 256 KiB on, where gloo takes half as long, and for large operations beside a computation, during which
# gloo's threads go on and MPI waits to be polled: messages above its eager limit, too. Measured with Open MPI
# 5.0, gloo of torch 2.13, two x86 cores (benchmarks/results/collectives_x86-2core-two-hosts_202611.md);
# `tune` measures other machines.
_CROSSOVER: Final = 256 * 1024
_BUILT_IN: Final = {
    "Open MPI": "openmpi_2ranks_1host.yaml",
    "MPICH": "mpich_2ranks_1host.yaml",
    "Intel MPI": "mpich_2ranks_1host.yaml",  # a derivative of MPICH; with both, our shared memory is chosen
}


def built_in_table(world: World) -> Table | None:
    """Return the built-in table for two ranks on one host and this MPI library; None for other jobs."""
    library = world.libraries.get("mpi", "")
    name = next((name for start, name in _BUILT_IN.items() if library.startswith(start)), None)
    if name is None or world.size != 2 or not world.single_host:
        return None
    return _loaded(FOLDER / name, "")


@lru_cache(maxsize=64)
def _loaded(path: Path, digest: str) -> Table:  # noqa: ARG001 - a changed file is a new cache entry
    from mcr_plus.tables.table import load_table  # imported here: most jobs have no table

    return load_table(path)


class SelectStage(Stage):
    """Stage that chooses a library. The caller or a rule comes first, then the table, then the preference.

    `Unsupported` is raised if the caller, a rule or the job's own table names a backend that does not support
    the operation. The built-in table and preference fall back to the next of the configuration's `backends`,
    and `explain` shows the fallback. With `online`, a choice by a table or by the preference is compared with
    rivals while the job runs.
    """

    Options = SelectOptions

    def __init__(self, options: SelectOptions, context: Context) -> None:
        self._options = options
        self._context = context
        self._own = options.table is not None
        self._table: Table | None = None
        if options.table is not None:
            self._table = _loaded(options.table.resolve(), options.table.digest())
        elif context.config.backends is None:
            self._table = built_in_table(context.world)
        hosts = Counter(context.world.hosts[rank] for rank in context.group.ranks)
        self._nodes, self._ranks_per_node = len(hosts), max(hosts.values())
        self._refinement: Refinement | None = None
        self._pool = Pool()
        # Then other code than the library's may run an operation.
        self._is_wrapped = any(
            isinstance(each, DispatchOptions) and (each.failover or each.verify)
            for each in context.config.all_options
        )
        if options.online:
            from mcr_plus.selection.online import Refinement  # imported here: most jobs do not refine

            self._refinement = Refinement(options, context, self._table)
            if context.runtime is not None:
                context.runtime.caches.append(self._refinement.forget)

    def bind(self, signature: Signature, next: Next) -> Issue:
        """Bind to the chosen backend."""
        choice, why, rule = self._choose(signature)
        if signature.adds_in_order and signature.nbytes != 0 and choice != "local":
            name, _, algorithm = choice.partition(":")
            if algorithm and choice == signature.backend:
                raise Unsupported(
                    f"{signature.describe()}: algorithm '{algorithm}' adds in an order of its own; "
                    f"name {name} alone, or sums: fast"
                )
            choice = name
            backend = self._context.backends[choice]
            if self._is_wrapped or not backend.adds_in_order:
                # On a stream means may be sums of divided values.
                of_two = signature.sums == "fixed" and signature.ranks == 2 and not backend.on_stream
                if not of_two or signature.dtype not in _ADDED_AS_THEY_ARE:
                    return self._in_order(signature, choice, next)
                why += "; sums: fixed: two values have one sum"
        chosen = _by(choice, signature)
        support = self._context.backends[chosen.backend or ""].supports(chosen)
        how = "" if support.level == "native" else f", emulated: {support.how}"
        rivals = self._rivals(choice, signature)
        online = f"; online refinement: {choice} against {', '.join(rivals)}" if rivals else ""
        next.note(f"backend {choice} ({why}{how}){online}", lambda: self._details(signature, choice, rule))
        if self._refinement is None or not rivals:
            return next(chosen)
        return self._refinement.bind(
            signature,
            (choice, *rivals),
            self._query(signature),
            place=lambda name, wanted: next(_by(name, wanted)),
            prefer=lambda wanted: self._preferred(wanted)[0],
        )

    def _in_order(self, signature: Signature, choice: str, next: Next) -> Issue:
        if signature.device != "cpu" and not self._context.backends[choice].on_stream:
            from mcr_plus.engine.streams import stage_through_host  # imported here: for devices alone

            on_host = self._in_order(signature.replace(device="cpu"), choice, next)
            return on_host if self._context.runtime is None else stage_through_host(signature, on_host)
        steps = registry.reproducible("sums over this library")(
            signature, self._context.group.rank, self._pool, partial(self.bind, next=next)
        )
        why = "may be replaced or verified" if self._is_wrapped else "has an order of its own"
        next.note(f"sums: {signature.sums}: {choice} {why}: {steps.description}")
        return Issue(steps.start)

    @classmethod
    def finish(cls, stages: Sequence[SelectStage]) -> None:
        """Write the results of online refinement, at the regular end of the job."""
        from mcr_plus.selection.refined_table import save_refined

        save_refined([stage._refinement for stage in stages if stage._refinement is not None])

    @property
    def needs_finish(self) -> bool:
        """True if online refinement has results to write."""
        return bool(self.state())

    def state(self) -> dict[str, Any]:
        """Return the results of online refinement: plain data, equal on all ranks of the group."""
        return {} if self._refinement is None else self._refinement.state

    def load_state(self, kept: MutableMapping[str, Any]) -> None:
        """Use results of an earlier job for operations bound from now on."""
        if self._refinement is not None:
            self._refinement.earlier = kept

    @cached_property
    def _costs(self) -> CostModel | None:
        if self._table is None:
            return None
        from mcr_plus.tables.cost import CostModel  # imported here: only `explain` and refinement need it

        return CostModel(self._table)

    # -- selection --------------------------------------------------------------------------------

    def _choose(self, signature: Signature) -> tuple[str, str, TableRule | None]:
        """Return the choice, the reason, and the table rule behind the choice, if any."""
        if names_no_algorithm(signature.backend):
            raise InvalidArgument(
                f"backend {signature.backend!r} names no algorithm; expected name or name:algorithm"
            )
        if signature.ranks == 1:
            if signature.backend is not None:
                # raises for an unknown name
                registry.get("backends", signature.backend.partition(":")[0])
            return "local", "a group of one rank needs no library", None
        if signature.backend is not None:
            self._require(signature.backend, signature, "named by the call or a rule")
            return signature.backend, "named by the call or a rule", None
        rule = self._rule(signature)
        if rule is not None and rule.backend == BUILT_IN:
            choice, why = self._preferred(signature)
            return choice, f"{why}, used by table {rule.place} for sizes that were not measured", rule
        if rule is not None and self._own:
            self._require(rule.backend, signature, f"chosen by {rule.place}")
            return rule.backend, f"table {rule.place}{self._guessed(rule, signature)}", rule
        known = self._context.backends
        if (
            rule is not None
            and rule.backend.partition(":")[0] in known
            and self._support(rule.backend, signature)
        ):
            why = f"built-in table {Path(rule.place).name}{self._guessed(rule, signature)}"
            return rule.backend, why, rule
        choice, why = self._preferred(signature)
        if self._own and self._table is not None:
            why = f"{why}; table {self._table.name} has no rule for it"
        return choice, why, None

    def _guessed(self, rule: TableRule, signature: Signature) -> str:
        largest = rule.measured_to(self._query(signature).size(rule.key.basis))
        return "" if largest is None else f", measured only up to {size_words(largest)}"

    def _rule(self, signature: Signature) -> TableRule | None:
        return None if self._table is None else self._table.lookup(self._query(signature))

    def _query(self, signature: Signature) -> Query:
        """Return the operation as a query for a table."""
        from mcr_plus.tables.table import Query

        nbytes = self._nbytes(signature)
        return Query(
            signature.kind, nbytes, dtype_name(signature.dtype), signature.ranks, self._nodes,
            self._ranks_per_node, signature.device, signature.async_op,
        )  # fmt: skip

    def _nbytes(self, signature: Signature) -> int | None:
        return self._options.vector_size if signature.nbytes is None else signature.nbytes

    def _preferred(self, signature: Signature) -> tuple[str, str]:
        refused: list[str] = []
        for name in self._preference(signature):
            support = self._support(name, signature)
            if support:
                skipped = f" after {'; '.join(refused)}" if refused else ""
                return name, f"built-in preference{skipped}"
            refused.append(f"{name}: {support.how}")
        raise Unsupported(
            f"no backend supports {signature.describe()}: {'; '.join(refused) or 'the job has none'}"
        )

    def _preference(self, signature: Signature) -> list[str]:
        known = self._context.backends
        if self._context.config.backends is not None:
            return list(known)
        nbytes = self._nbytes(signature)
        least = EAGER + 1 if signature.is_p2p else _CROSSOVER
        large = self._nodes > 1 and (nbytes is None or nbytes >= least)
        # Both ends of a message must choose alike, whether they wait or not.
        beside = signature.async_op or signature.is_p2p or signature.kind in REDUCING

        def place(name: str) -> float:
            preference = known[name].preference
            if signature.device == "cuda":
                return preference.cuda
            return preference.between_hosts if large and beside else preference.cpu

        return sorted(known, key=place)

    def _rivals(self, chosen: str, signature: Signature) -> list[str]:
        """Return the rivals that online refinement compares with the choice; empty without refinement."""
        if self._refinement is None or signature.adds_in_order or not self._refinement.tunes(signature):
            return []
        known = self._context.backends
        measured = self._costs.choices(self._query(signature)) if self._costs is not None else []
        names = [name for name in dict.fromkeys([*known, *measured]) if name.partition(":")[0] in known]
        return [name for name in names if name != chosen and self._support(name, signature)]

    def _support(self, choice: str, signature: Signature) -> Support:
        return self._context.backends[choice.partition(":")[0]].supports(_by(choice, signature))

    def _require(self, choice: str, signature: Signature, why: str) -> None:
        name = choice.partition(":")[0]
        known = self._context.backends
        if name not in known:
            kind = backend_class(name)
            availability = kind.availability()
            if not availability.available:
                missing = f"is not part of this job ({availability.reason}; {availability.remedy})"
            elif reason := kind.unavailable_for(self._context.world, self._context.group):
                missing = f"is not available: {reason}"
            else:
                missing = "is not part of this job"
            raise Unsupported(f"backend '{name}' ({why}) {missing}; backends here: {', '.join(known)}")
        support = self._support(choice, signature)
        if not support:
            others = [other for other in known if self._support(other, signature)]
            raise Unsupported(
                f"backend '{choice}' ({why}) does not support {signature.describe()}: {support.how}; "
                f"backends that do: {', '.join(others) or 'none'}"
            )

    # -- explaining -------------------------------------------------------------------------------

    def _details(self, signature: Signature, chosen: str, rule: TableRule | None) -> dict[str, Any]:
        """Return the table rule that applied, and each alternative with expected time and disadvantage."""
        query = self._query(signature)
        measured = self._costs.choices(query) if self._costs is not None else []
        own = None if self._costs is None else self._costs.expected(chosen, query)
        names = list(dict.fromkeys([chosen, *self._context.backends, *measured]))
        return {
            "table_rule": None if rule is None else rule.place,
            "expected_us": _rounded(None if own is None else own.us),
            "alternatives": {name: self._alternative(name, chosen, own, signature) for name in names},
            **self._origin(),
        }

    def _origin(self) -> dict[str, Any]:
        """Return the differences between this job and the job in which its table was measured."""
        table, world = self._table, self._context.world
        if table is None or not self._own:
            return {}
        from mcr_plus.tables.fingerprint import differences, fingerprint_here

        shape = Counter(world.hosts)
        here = fingerprint_here(
            world.libraries, ranks=world.size, nodes=len(shape), ranks_per_node=max(shape.values())
        )
        different = differences(table.fingerprint, here)
        return {"measured_elsewhere": different, "strict": table.strict} if different else {}

    def _alternative(
        self, name: str, chosen: str, own: Estimate | None, signature: Signature
    ) -> Mapping[str, Any]:
        known = name.partition(":")[0] in self._context.backends
        support = self._support(name, signature) if known else Support("no", "not part of this job")
        query = self._query(signature)
        estimate = self._costs.expected(name, query) if self._costs is not None and support else None
        return {
            "support": support.level,
            "how": support.how,
            "expected_us": _rounded(None if estimate is None else estimate.us),
            "extrapolated": None if estimate is None else estimate.extrapolated,
            "figure": None if estimate is None else estimate.figure,
            "bound_us": _rounded(None if estimate is None else estimate.bound_us),
            "why": "chosen" if name == chosen else self._why_not(name, support, own, estimate, signature),
        }

    def _why_not(
        self,
        name: str,
        support: Support,
        own: Estimate | None,
        other: Estimate | None,
        signature: Signature,
    ) -> str:
        if not support:
            return support.how
        if signature.backend is not None:
            return "another was named"
        rule = self._rule(signature)
        if rule is None or rule.backend == BUILT_IN:
            return "later in the built-in preference"
        if other is None and self._query(signature).nbytes is None:
            return "not looked up: sizes differ between ranks; set `vector_size` to look up a size"
        if other is None:
            return "not measured"
        if own is None:
            return "the table names another, which was not measured"
        if not (own.comparable and other.comparable):
            return f"not measured at this size; {rule.place} decides"
        from mcr_plus.tables.table import CLEAR

        if max(own.us / other.us, other.us / own.us) < CLEAR:
            return "expected to take as long"
        if other.us > own.us:
            return f"expected to take {_factor(other.us / own.us)} × as long"
        if own.extrapolated or other.extrapolated:
            return f"not measured at this size; {rule.place} decides"
        return f"measured to be {_factor(own.us / other.us)} × as fast{_all_the_same(rule, name)}"


def _all_the_same(rule: TableRule, name: str) -> str:
    """Return the reason why a rule does not choose a candidate that was faster at one of the rule's sizes."""
    if rule.reason:
        return f"; reason of the rule: {rule.reason}"
    from mcr_plus.tables.table import CLEAR

    advantage = rule.advantage(name)
    if advantage is not None and advantage >= CLEAR:
        longer = f"{_factor(advantage)} × as long"
        return f" at this size, but takes {longer} on average over the sizes of the rule, {rule.span()}"
    return f"; {rule.place} chooses otherwise and states no `reason`"


def _rounded(us: float | None) -> float | None:
    return None if us is None else round(us, 3)


def _factor(ratio: float) -> str:
    return f"{ratio:.3g}" if ratio < 1000 else f"{ratio:.0f}"


def _by(choice: str, signature: Signature) -> Signature:
    """Return the operation bound to a choice: a backend, or `name:algorithm`."""
    name, _, algorithm = choice.partition(":")
    return signature.replace(backend=name, algorithm=algorithm or None)
