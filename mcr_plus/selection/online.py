"""Online refinement: the select stage measures while the job runs, and writes the results to a table.

An operation that several choices support has an `OnlineTrial`. A `Router` sends calls to the current choice,
and at most one call in sixteen to a rival. The ranks share their times and draw the
same conclusion from the same numbers: a rival is dropped, the choice changes, or the trial ends. After the
trial, each call costs one more Python call than without refinement.

A rank that is ahead of another by more than the trial's lag waits for the shared times before its next call.
Issuing an asynchronous operation must never wait, so only synchronous operations are tuned.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, Final

from mcr_plus.core.message import Message, Signature
from mcr_plus.errors import Unsupported
from mcr_plus.pipeline.stage import Context, Issue
from mcr_plus.selection.options import SelectOptions
from mcr_plus.selection.refined_table import RefinedTable, target_path
from mcr_plus.selection.trial import OnlineTrial
from mcr_plus.tables.fingerprint import fingerprint_here
from mcr_plus.tables.table import Query, Table
from mcr_plus.trials.router import Router, exchange_signature

_log = logging.getLogger("mcr_plus")

TAG: Final = "select.online"  # tag of the all_reduce that shares times


class Refinement:
    """Online refinement of one select stage: its trials, and the file for their results."""

    def __init__(self, options: SelectOptions, context: Context, table: Table | None) -> None:
        """Create the refinement. Raises `ConfigError` if the result file is the table itself."""
        self.table = table
        self.path = target_path(options)
        self.writes = context.world.rank == 0
        self._world = context.world
        self.earlier: MutableMapping[str, Any] = {}  # results from an earlier job, and from dropped bindings
        self._settled: dict[str, RefinedTable] = {}  # trials that ended in an earlier job, or before `forget`
        self._hosts = {context.world.hosts[rank] for rank in context.group.ranks}
        self._trials: list[tuple[Router, OnlineTrial, Query, Callable[[int], str | None]]] = []

    @staticmethod
    def tunes(signature: Signature) -> bool:
        """Return True if the choice of an operation may change while the job runs.

        Not tuned: operations whose backend a call or rule names; send and receive, because both ends must
        agree; operations on a GPU, because the host does not see when they end; and asynchronous operations,
        because issuing must never wait.
        """
        fixed = signature.backend is not None or signature.is_p2p or signature.kind == "barrier"
        waits = not signature.async_op and signature.device == "cpu"
        return waits and not fixed and signature.ranks > 1 and signature.nbytes != 0

    def bind(
        self,
        signature: Signature,
        candidates: Sequence[str],
        query: Query,
        *,
        place: Callable[[str, Signature], Issue],
        prefer: Callable[[Signature], str],
    ) -> Issue:
        """Return the issue of an operation. A trial routes each call to a candidate, at first to number 0.

        `query`: the operation as a table query. `place`: binds an operation to a choice; rivals for which it
        raises `Unsupported` are omitted. `prefer`: the choice if no table has a rule.
        """
        bound = {candidates[0]: place(candidates[0], signature)}
        for rival in candidates[1:]:
            with suppress(Unsupported):  # raised on all ranks or none
                bound[rival] = place(rival, signature)
        if len(bound) == 1:
            return bound[candidates[0]]

        def default(size: int) -> str | None:
            try:
                return prefer(signature.replace(nbytes=size))
            except Unsupported:
                return None

        earlier = self.earlier.get(name := _name(query, bound), {})
        if earlier.get("choice") in bound:
            choice = earlier["choice"]
            if earlier.get("ended"):
                self._settled[name] = RefinedTable(query, choice, earlier.get("us", {}), default)
                return bound[choice]
            bound = {choice: bound[choice], **bound}
        trial, issues = OnlineTrial.of(list(bound)), list(bound.values())
        reduction = exchange_signature(signature, trial, TAG)
        exchange = place(prefer(reduction), reduction)

        def show_operation() -> None:
            # Each issue has its own operation. A persistent operation that is bound now keeps the current
            # choice.
            router.issue.operation = issues[trial.chosen].operation

        router = Router(
            trial,
            issues,
            lambda values: exchange(Message(reduction, (values,), (values,))),
            one_clock=len(self._hosts) == 1,
            agreed=show_operation,
        )
        show_operation()
        self._trials.append((router, trial, query, default))
        return router.issue

    @property
    def state(self) -> dict[str, dict[str, Any]]:
        """Results of the trials so far, for a later job: plain data, equal on all ranks."""
        state = {
            name: {"choice": each.choice, "us": dict(each.measured), "ended": True}
            for name, each in self._settled.items()
        }
        for _, trial, query, _ in self._trials:
            choice = trial.candidates[trial.chosen]
            state[_name(query, trial.candidates)] = {
                "choice": choice, "us": _microseconds(trial), "ended": trial.frozen
            }  # fmt: skip
        return {**self.earlier, **state}

    def forget(self) -> None:
        """End the trials. Operations that are bound again continue from the results."""
        self.earlier.update(self.state)
        for _, trial, query, default in self._trials:
            if known := _microseconds(trial):
                choice = trial.candidates[trial.chosen]
                self._settled[_name(query, trial.candidates)] = RefinedTable(query, choice, known, default)
        self._trials.clear()

    def learnt(self) -> list[RefinedTable]:
        """Return the results of this stage's trials, including unfinished trials."""
        settled = dict(self._settled)
        later = []
        for router, trial, query, default in self._trials:
            router.finish()
            if known := _microseconds(trial):
                settled.pop(_name(query, trial.candidates), None)
                later.append(RefinedTable(query, trial.candidates[trial.chosen], known, default))
        return [*settled.values(), *later]

    def fingerprint(self) -> dict[str, tuple[str, ...]]:
        """Return the fingerprint of this job."""
        nodes = Counter(self._world.hosts)
        return fingerprint_here(
            self._world.libraries,
            ranks=self._world.size,
            nodes=len(nodes),
            ranks_per_node=max(nodes.values()),
        )


def _name(query: Query, candidates: Iterable[str]) -> str:
    """Return a name for an operation and its candidates, independent of their order."""
    return f"{' '.join(map(str, query))}: {', '.join(sorted(candidates))}"


def _microseconds(trial: OnlineTrial) -> dict[str, float]:
    """Return the candidates' last medians in microseconds, without candidates that have none."""
    pairs = zip(trial.candidates, trial.medians, strict=True)
    return {name: seconds * 1e6 for name, seconds in pairs if seconds is not None}
