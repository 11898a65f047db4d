"""An explicit-state model checker for membership: every interleaving of ranks that leave epochs together.

The model mirrors `EpochLog.settle`, `epoch_log.join` and `runtime.regroup`, request by request of the store,
and calls the real `decide` and `members_after`. A rank is in one of these phases:

    world     it runs, in a world that is made
    left      it has written `leaving`, and not its proposal yet
    settle    it has proposed, and waits for the decision or makes it
    read      it decides: it reads proposals one by one
    hold      it has come to a decision, and has not written it yet
    pass      it writes a decision to the keepers, one by one; only where there are several
    arrive    it has read a decision, and has not begun to make the next world yet
    build     it waits for the other members of the next epoch
    count, ask, join    a newcomer has not begun, has a number, and waits to be taken in
    gone      it has raised, and its process ends

Around them, an adversary kills processes, stops and continues them, fails requests of the store, and lets a
rank take another one for silent. Deaths are noticed late: at each look, a rank sees any part of them, and all
of them at last. Once nothing else can happen, deadlines pass; with `early`, at any moment. Builds have no
deadline here, so that a rank which nobody tells is found.

Each rule of the design can be switched off. What they are in the code:

    compare_set       Roster writes a decision by compare_set. Off: by set.
    majority          `decide` asks for a majority of the members that may run. Off: min_ranks=1.
    waits_for_living  `decide` waits for members that have not proposed and live. Off: it leaves them out.
    marker            a build ends when `leaving` is written. Off: when the rank sees the loss itself.
    one_outcome       whether a world is made is one value in the store, by compare_set. Off: a rank is in the
                      new world once it has seen all others arrive, and out of it once it has left the build.
    settles_again     ranks that see a loss during a build decide again. Off: each goes on without that rank.
    same_attempt      a call whose request the store has failed is repeated under the same number of attempt.
    requests_stay     a newcomer's request stays in the store. Off: whoever reads it takes it away.
    knows_taken       the decisions say who has been taken in. Off: a rank knows what it has read itself.
    minority_waits    `decide` refuses a minority once all that may run have proposed, or the time is over.
                      Off: at once.
    tells_later       a rank that sees a death after its proposal adds it, as others may not see it. Off: it
                      keeps it to itself.
    passes_on         a rank writes a decision to all keepers before it goes by it, also one that it has read.
                      Off: it writes its own to the first one, and goes by what it reads.
    one_order         all write to the keepers in the same order. Off: every other rank in the opposite one.
    last_counts       a rank goes by what the last keeper has answered. Off: by what the first one has.
    believes_error    a build that has ended for a loss is left, also if the rank runs when it is looked at
                      again. Off: the call raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from unit.membership.membership_states import (
    ALL_RULES,
    Access,
    Attempt,
    Bid,
    Choice,
    Epoch,
    Look,
    Move,
    Rank,
    Rules,
    Setup,
    State,
    choose,
    decided,
    seen,
)


@dataclass(frozen=True)
class Verdict:
    problem: str
    states: int
    trace: tuple[str, ...] = ()
    ends: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return "\n".join([*self.trace, f"=> {self.problem or 'fine'}"])


class ViolationError(Exception):
    """A state that must not be."""


_EXCHANGES: Final = 2  # of a build: a rank that leaves after the first keeps the others from the second
_DEAD: Final = Rank("gone", "dead")
_GONE: Final = Rank("gone")


class Model(Access):
    """The steps of one setup under some rules."""

    def __init__(self, setup: Setup, rules: Rules = ALL_RULES) -> None:
        super().__init__(setup)
        self.rules = rules
        self.least = 1 if setup.least is None and not rules.majority else setup.least
        self.ends: set[str] = set()

    def initial(self) -> State:
        setup, members = self.setup, tuple(range(self.setup.ranks))
        done = setup.done or (0,) * setup.ranks
        ranks = [Rank("world", members=members, done=done[member], calls=setup.calls) for member in members]
        if setup.newcomer:
            ranks.append(Rank("count", calls=setup.calls))
        stores = ((Epoch(),),) * (1 + max(self.sides))
        return State(
            tuple(ranks), stores, "no", setup.crashes, setup.stops, setup.lies, setup.failures,
            (True,) * setup.keepers,
        )  # fmt: skip

    # -- the steps of a rank ---------------------------------------------------------------------------

    def _ends(self, state: State, who: int, why: str) -> State:
        self.ends.add(why)
        return state._replace(ranks=(*state.ranks[:who], _GONE, *state.ranks[who + 1 :]))

    def _leave(self, state: State, who: int, look: Look, lies: int = 0) -> State:
        """Begin to leave the epoch: those that wait for this rank are told."""
        rank = state.ranks[who]
        told = self._epoch(state, who, rank.epoch).told or rank.phase == "world"
        state = self._write(state._replace(lies=state.lies - lies), who, leaving=True, told=told)
        calls = 0 if rank.phase == "build" else rank.calls  # the old world is gone: nobody can call again
        return self._with(state, who, phase="left", look=look, calls=calls, at=0)

    def steps(self, state: State, who: int) -> Iterator[Move]:
        """What a rank that runs may do next."""
        rank = state.ranks[who]
        name = f"rank {who}" if who != self.newcomer else "the newcomer"
        for text, after, fair in getattr(self, f"_from_{rank.phase}")(state, who):
            yield Move(f"{name} {text}", after, fair)

    def _from_world(self, state: State, who: int) -> Iterator[Move]:
        rank = state.ranks[who]
        epoch = self._epoch(state, who, rank.epoch)
        told = epoch.told
        for look, lies in self._looks(state, who):
            if look or told:
                yield Move(f"leaves, {seen(look)}", self._leave(state, who, look, lies), not lies)
        together = all(
            state.ranks[member].phase == "world" and state.ranks[member].epoch == rank.epoch
            for member in rank.members
        )
        if together and not told and rank.members[0] == who and self._newcomer(state, who) is not None:
            yield Move("leaves, to take the newcomer in", self._leave(state, who, ()))

    def _from_left(self, state: State, who: int) -> Iterator[Move]:
        rank = state.ranks[who]
        mine, bids = rank.members.index(who), self._attempt(state, who).bids
        bid = Bid(rank.look, rank.done)
        bids = (*bids[:mine], bid, *bids[mine + 1 :])
        state = self._note(state, who, bids=bids)
        got = (*(None,) * mine, bid, *(None,) * (self.size - mine - 1)) if self.setup.fine else ()
        yield Move("proposes", self._with(state, who, phase="settle", look=(), got=got))

    def _from_settle(self, state: State, who: int) -> Iterator[Move]:
        rank, attempt = state.ranks[who], self._attempt(state, who)
        if (written := self._written(state, attempt)) is not None:
            if self.setup.keepers > 1 and self.rules.passes_on:
                yield Move("finds a decision", self._with(state, who, phase="pass", decision=written, at=0))
            else:
                yield from self._reads_decision(state, who, attempt, written)
            return
        mine = rank.members.index(who)
        if self.setup.hosts and self.rules.tells_later:
            yield from self._adds(state, who, attempt)
        news = rank.got != attempt.bids
        for look, lies in self._looks(state, who):
            lost = dict(look)
            if not (rank.expired or all(lower in lost for lower in range(mine))):
                continue
            # Only a look that finds something new is a step; the others change nothing.
            bids = attempt.bids if news else rank.got
            if news or self._decide(state, who, bids, look, rank.expired) is not None:
                got = rank.got or (None,) * self.size
                after = state._replace(lies=state.lies - lies)
                after = self._with(after, who, phase="read", look=look, at=0, got=got)
                yield Move(f"looks, {seen(look)}", after, not lies)
        if state.failures:
            number = rank.attempt + (not self.rules.same_attempt)
            for look, lies in self._looks(state, who):
                after = state._replace(failures=state.failures - 1, lies=state.lies - lies)
                after = self._with(after, who, phase="left", look=look, attempt=number, got=())
                yield Move(f"gets no answer from the store, and calls again, {seen(look)}", after, False)

    def _adds(self, state: State, who: int, attempt: Attempt) -> Iterator[Move]:
        """A rank writes its proposal again, with deaths that it has seen since."""
        rank = state.ranks[who]
        mine = rank.members.index(who)
        bid = attempt.bids[mine]
        assert bid is not None
        for look, _ in self._looks(state, who):
            found = {**dict(bid.lost), **{other: life for other, life in look if life == "dead"}}
            more = bid._replace(lost=tuple(sorted(found.items())))
            if more != bid:
                after = self._note(state, who, bids=(*attempt.bids[:mine], more, *attempt.bids[mine + 1 :]))
                yield Move(f"adds to its proposal, {seen(look)}", after)

    def expiry(self, state: State, who: int) -> Move | None:
        """The deadline of a call passes."""
        rank = state.ranks[who]
        name = f"rank {who}" if who != self.newcomer else "the newcomer"
        if rank.life != "runs" or rank.expired:
            return None
        if rank.phase == "ask" or rank.phase == "join":
            return Move(f"{name} waits no longer", self._ends(state, who, "not taken in"), False)
        if rank.phase == "settle" and self._written(state, self._attempt(state, who)) is None:
            return Move(f"the deadline of {name} passes", self._with(state, who, expired=True), False)
        return None

    def _newcomer(self, state: State, who: int) -> int | None:
        """The newcomer, if a rank would take it in now."""
        if state.asked != "written" or state.ranks[who].dropped:
            return None
        if self.rules.knows_taken:
            store = state.stores[self.sides[who]]
            for epoch in store[: state.ranks[who].epoch]:
                if any(self.newcomer in members for members in epoch.went):
                    return None
        return self.newcomer

    def _decide(
        self, state: State, who: int, bids: tuple[Bid | None, ...], look: Look, expired: bool
    ) -> Choice | None:
        members, newcomer = state.ranks[who].members, self._newcomer(state, who)
        if not self.rules.waits_for_living:
            lost = dict(look)
            absent = [rank for rank, _ in enumerate(members) if bids[rank] is None and rank not in lost]
            look = (*look, *((rank, "silent") for rank in absent))
        arguments = (members, bids[: len(members)], look, newcomer, self.setup.ranks)
        found = choose(*arguments, expired, self.least)
        if found is None and not self.rules.minority_waits:
            last = choose(*arguments, True, self.least)
            found = last if last is not None and last.refusal == "minority" else None
        return found

    def _from_read(self, state: State, who: int) -> Iterator[Move]:
        rank = state.ranks[who]
        if rank.at < len(rank.members):
            bid = self._attempt(state, who).bids[rank.at]
            got = (*rank.got[: rank.at], bid, *rank.got[rank.at + 1 :])
            yield Move(f"reads proposal {rank.at}", self._with(state, who, at=rank.at + 1, got=got))
            return
        found = self._decide(state, who, rank.got, rank.look, rank.expired)
        heard = rank.heard or state.asked in ("written", "taken away")
        if found is None:
            after = self._with(state, who, phase="settle", look=(), at=0, heard=heard)
            if self.setup.fine:  # otherwise it has been as if it had not looked
                yield Move("has to wait", after)
            return
        if state.asked == "written" and not self.rules.requests_stay:
            state = state._replace(asked="taken away")
        after = self._with(
            state, who, phase="hold", look=(), at=0, got=(), decision=found, heard=heard, expired=False
        )
        yield Move(f"decides: {decided(found)}", after)

    def _from_hold(self, state: State, who: int) -> Iterator[Move]:
        if self.setup.keepers > 1:
            yield from self._from_pass(state, who)
            return
        written, mine = self._attempt(state, who).decision, state.ranks[who].decision
        state = self._with(state, who, phase="settle", decision=None)
        if written is None or not self.rules.compare_set:
            yield Move("writes its decision", self._note(state, who, decision=mine))
        else:
            yield Move("finds a decision written", state)

    def _written(self, state: State, attempt: Attempt) -> Choice | None:
        """The decision, as the last of the keepers has it that have one."""
        copies = [copy for copy, runs in zip(attempt.copies, state.keepers, strict=False) if runs and copy]
        return copies[-1] if copies else attempt.decision

    def _from_pass(self, state: State, who: int) -> Iterator[Move]:
        """Write a decision to the next keeper, and go by it after the last one."""
        rank, attempt = state.ranks[who], self._attempt(state, who)
        order = list(range(self.setup.keepers))
        if not self.rules.one_order and who % 2:
            order.reverse()
        left = [keeper for keeper in order[rank.at :] if state.keepers[keeper]]
        choice = rank.decision
        assert choice is not None
        if not left:
            state = self._with(state, who, phase="settle", decision=None, at=0)
            yield from self._reads_decision(state, who, attempt, choice)
            return
        keeper = left[0]
        copies = attempt.copies or (None,) * self.setup.keepers
        found = copies[keeper] or choice
        state = self._note(state, who, copies=(*copies[:keeper], found, *copies[keeper + 1 :]))
        if not self.rules.passes_on:
            yield Move("writes its decision", self._with(state, who, phase="settle", decision=None, at=0))
            return
        kept = found if self.rules.last_counts or rank.at == 0 else choice
        after = self._with(state, who, phase="pass", decision=kept, at=order.index(keeper) + 1)
        yield Move(f"writes to keeper {keeper}: {decided(found)}", after)

    def _reads_decision(self, state: State, who: int, attempt: Attempt, choice: Choice) -> Iterator[Move]:
        rank = state.ranks[who]
        if attempt.first not in (None, choice):
            raise ViolationError(f"rank {who} reads {decided(choice)}; another has read another decision")
        if attempt.first is None:
            state = self._note(state, who, first=choice)
        if choice.refusal is not None:
            self._check_refusal(choice.refusal, rank.epoch)
            text = f"reads that the attempt is refused ({choice.refusal})"
            if rank.calls:
                again: dict[str, Any] = {
                    "attempt": rank.attempt + 1,
                    "calls": rank.calls - 1,
                    "phase": "world",
                }
                state = self._with(state, who, expired=False, got=(), **again)
                for look, lies in self._looks(state, who):
                    after = self._leave(state, who, look, lies)
                    yield Move(f"{text}, and calls again, {seen(look)}", after, not lies)
            else:
                yield Move(text, self._ends(state, who, choice.refusal))
            return
        if rank.members.index(who) not in choice.stay:
            setup = self.setup
            if not (setup.stops or setup.lies or setup.sides):
                raise ViolationError(f"rank {who} runs, nobody has found it lost, and it is left out")
            yield Move("reads that it is left out", self._ends(state, who, "revoked"))
            return
        if choice.done is not None and choice.done > (rank.done or 0):
            raise ViolationError(
                f"rank {who} reads that operation {choice.done} is done, and has done {rank.done or 0}"
            )
        yield Move("reads the decision", self._go_on(state, who, choice.members))

    def _check_refusal(self, refusal: str, epoch: int) -> None:
        setup = self.setup
        if refusal == "absent" and not setup.early:
            raise ViolationError("ranks that live were waited for until the deadline, and have not come")
        if refusal == "minority" and epoch == 0 and setup.liar is not None and not setup.crashes:
            raise ViolationError("a majority that could go on is refused for one rank that hears nobody")

    def _go_on(self, state: State, who: int, members: tuple[int, ...]) -> State:
        """Enter the next epoch."""
        rank = state.ranks[who]
        went = self._epoch(state, who, rank.epoch).went
        if members not in went:
            state = self._write(state, who, went=tuple(sorted((*went, members))))
        dropped = rank.dropped or (rank.heard and self.newcomer in members)
        entered = Rank(
            "arrive", epoch=rank.epoch + 1, members=members, calls=rank.calls, heard=rank.heard,
            dropped=dropped and not self.rules.knows_taken,
        )  # fmt: skip
        if rank.epoch > 8:
            raise ViolationError("epochs follow each other without end")
        return state._replace(ranks=(*state.ranks[:who], entered, *state.ranks[who + 1 :]))

    def _from_arrive(self, state: State, who: int) -> Iterator[Move]:
        yield Move("arrives", self._exchange(state, who, 0))

    def _exchange(self, state: State, who: int, number: int) -> State:
        """Write the value of one of a build's exchanges, in which each rank waits for those of all."""
        arrived = self._epoch(state, who, state.ranks[who].epoch).arrived
        state = self._write(state, who, arrived=tuple(sorted({*arrived, (who, number)})))
        return self._with(state, who, phase="build", at=number)

    def _from_build(self, state: State, who: int) -> Iterator[Move]:
        rank = state.ranks[who]
        epoch = self._epoch(state, who, rank.epoch)
        if all((member, rank.at) in epoch.arrived for member in rank.members):
            if rank.at + 1 < _EXCHANGES:
                yield Move("goes on with its build", self._exchange(state, who, rank.at + 1))
            else:
                yield from self._concludes(state, who, "made")
        told = self.rules.marker and epoch.leaving
        for look, lies in self._looks(state, who):
            if not (look or told):
                continue
            if not self.rules.settles_again:
                left = tuple(m for number, m in enumerate(rank.members) if number not in dict(look))
                yield Move(f"goes on without them, {seen(look)}", self._go_on(state, who, left))
                continue
            for move in self._concludes(state._replace(lies=state.lies - lies), who, "left", look):
                yield move._replace(fair=move.fair and not lies)
            if any(found != "dead" for _, found in look):  # what it has seen is over when it looks again
                if not (told or self.rules.believes_error):
                    raise ViolationError(f"rank {who} raises, {seen(look)}, although that is over")
                for move in self._concludes(state._replace(lies=state.lies - lies), who, "left", ()):
                    yield move._replace(fair=False)

    def _concludes(
        self, state: State, who: int, outcome: Literal["made", "left"], look: Look | None = None
    ) -> Iterator[Move]:
        """A build ends: the first of the members says how. `look`: what it has left the build for."""
        rank = state.ranks[who]
        if self.rules.one_outcome:
            outcome = self._epoch(state, who, rank.epoch).outcome or outcome
            state = self._write(state, who, outcome=outcome)
        if outcome == "made":
            assert (who, _EXCHANGES - 1) in self._epoch(state, who, rank.epoch).arrived
            done = int(rank.members[0] == who)  # a broadcast of the first one, which others have not got
            yield Move("has made the world", self._with(state, who, phase="world", done=done, at=0))
        elif look is not None:
            yield Move(f"leaves its build, {seen(look)}", self._leave(state, who, look))
        else:
            for other, lies in self._looks(state, who):
                after = self._leave(state, who, other, lies)
                yield Move(f"reads that others have left, {seen(other)}", after, not lies)

    def _from_count(self, state: State, who: int) -> Iterator[Move]:
        state = state._replace(asked="counted")
        yield Move("gets a number", self._with(state, who, phase="ask"))

    def _from_ask(self, state: State, who: int) -> Iterator[Move]:
        state = state._replace(asked="written")
        yield Move("asks to be taken in", self._with(state, who, phase="join"))

    def _from_join(self, state: State, who: int) -> Iterator[Move]:
        for number, epoch in enumerate(state.stores[self.sides[who]]):
            for attempt in epoch.attempts:
                choice = attempt.decision
                if choice is not None and choice.join:
                    state = self._with(state, who, epoch=number)
                    yield Move("reads that it is taken in", self._go_on(state, who, choice.members))
                    return

    def _from_gone(self, state: State, who: int) -> Iterator[Move]:
        return iter(())

    # -- all steps -------------------------------------------------------------------------------------

    def moves(self, state: State) -> list[Move]:
        """Every step that is possible, of ranks and of the adversary."""
        running = [who for who, rank in enumerate(state.ranks) if rank.life == "runs"]
        if not self.setup.fine and self.rules.compare_set:
            for who in running:
                if self._stays(state, who):  # of which nobody sees anything: a crash may as well come after
                    return list(self._merged(state, who))
        found = [move for who in running for move in self._merged(state, who)]
        if self.setup.early or not any(move.fair for move in found):
            found.extend(filter(None, (self.expiry(state, who) for who in running)))
        return [*found, *self._adversary(state)]

    def _stays(self, state: State, who: int) -> bool:
        rank = state.ranks[who]
        if self.setup.keepers > 1:  # of which one may die before this rank has written to the next
            return False
        choice = self._attempt(state, who).decision if rank.phase == "settle" else None
        return choice is not None and choice.refusal is None and rank.members.index(who) in choice.stay

    def _merged(self, state: State, who: int) -> Iterator[Move]:
        """Steps of a rank up to the next one that others may see."""
        for move in self.steps(state, who):
            if self.setup.fine or move.after.ranks[who].phase not in ("left", "read"):
                yield move
                continue
            for rest in self._merged(move.after, who):
                yield Move(f"{move.text}; {rest.text}", rest.after, move.fair and rest.fair)

    def _adversary(self, state: State) -> Iterator[Move]:
        keepers = state.keepers
        for keeper, runs in enumerate(keepers):
            if runs and keepers.count(False) < self.setup.keepers_die and sum(keepers) > 1:
                after = state._replace(keepers=(*keepers[:keeper], False, *keepers[keeper + 1 :]))
                yield Move(f"keeper {keeper} dies", after, False)
        for who, rank in enumerate(state.ranks):
            if rank.phase == "gone":
                continue
            ranks = state.ranks
            if state.crashes and self.is_observed(state, who):
                after = state._replace(
                    ranks=(*ranks[:who], _DEAD, *ranks[who + 1 :]), crashes=state.crashes - 1
                )
                yield Move(f"{who} dies", after, False)
            if rank.life == "stopped":
                yield Move(f"{who} continues", self._with(state, who, life="runs"), False)
            elif state.stops:
                after = self._with(state._replace(stops=state.stops - 1), who, life="stopped")
                yield Move(f"{who} is stopped", after, False)

    # -- what must hold --------------------------------------------------------------------------------

    def problem(self, state: State) -> str:
        """What is wrong in a state; empty if nothing is."""
        for number in range(max(map(len, state.stores))):
            went = {
                members for store in state.stores if number < len(store) for members in store[number].went
            }
            if any(not set(one) & set(other) for one in went for other in went):
                return f"split brain: ranks {' and '.join(map(str, sorted(went)))} go on from epoch {number}"
            if len(went) > 1:
                return f"ranks differ in who goes on from epoch {number}: {sorted(went)}"
            if any(len(set(members)) < len(members) for members in went):
                return f"a process is two ranks after epoch {number}: {sorted(went)}"
        for who, rank in enumerate(state.ranks):
            if rank.phase not in ("gone", "count", "ask", "join") and who not in rank.members:
                return f"rank {who} acts in epoch {rank.epoch}, to which it does not belong"
        return ""

    def stuck(self, state: State) -> str:
        """What is wrong in a state in which only the adversary acts, or time; empty if nothing is."""
        running = {who: rank for who, rank in enumerate(state.ranks) if rank.life == "runs"}
        if any(rank.phase == "settle" and not rank.expired for rank in running.values()):
            return ""
        worlds = [rank for rank in running.values() if rank.phase == "world"]
        for who, rank in running.items():
            if rank.phase == "join":
                if worlds:
                    return "the newcomer is not taken in"
            elif rank.phase == "world":
                others = {state.ranks[member][:4] for member in rank.members}
                if others != {rank[:4]}:
                    return f"rank {who} is in a world of {rank.members}, in which the others are not"
            elif rank.phase != "gone":
                return f"rank {who} stands at '{rank.phase}' of epoch {rank.epoch} for good"
        self.ends.update(f"world of {len(rank.members)}" for rank in worlds)
        return ""


def check(setup: Setup, rules: Rules = ALL_RULES) -> Verdict:
    """Explore every interleaving, breadth first: the trace of a problem is a shortest one."""
    model = Model(setup, rules)
    start = model.initial()
    cause: dict[State, tuple[State, str] | None] = {start: None}
    waiting = deque([start])

    def found(state: State, problem: str) -> Verdict:
        steps = []
        while (step := cause[state]) is not None:
            state = step[0]
            steps.append(step[1])
        return Verdict(problem, len(cause), tuple(reversed(steps)))

    while waiting:
        state = waiting.popleft()
        try:
            moves = model.moves(state)
        except ViolationError as violation:
            return found(state, str(violation))
        if not any(move.fair for move in moves) and (problem := model.stuck(state)):
            return found(state, problem)
        for move in moves:
            if move.after not in cause:
                cause[move.after] = (state, move.text)
                if problem := model.problem(move.after):
                    return found(move.after, problem)
                waiting.append(move.after)
    return Verdict("", len(cause), ends=frozenset(model.ends))
