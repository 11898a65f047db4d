"""An explicit-state model checker for the issuer: every interleaving of a small program, without a GPU.

The model is a copy in miniature of `mcr_plus/dispatch`, with its names. A program lists the operations that
each rank issues and waits for. Two kinds of library are modelled:

    H  needs the host, like MPI: an operation advances at a rank only while that rank polls.
    S  runs on a stream, like NCCL: the first operation in a stream occupies it until it is the first at
       every member; the host is not needed.

Each rule of the design can be switched off. The rules in the code:

    one_order              GroupState.sequence and .check_thread: one thread, one number per operation.
                           Here: which programs `programs` makes; off, ranks may issue in different orders.
    issue_never_blocks     Channel.bind gives a Start that returns at once (Iallreduce, not Allreduce).
                           Off: issuing on H is a blocking call of the library.
    wait_progresses_all    Engine.wait, and so drain, calls Engine.progress: all libraries, all queues. A wait
                           on a stream operation only orders the stream. Off: a wait polls its own operation
                           (and its `after`), and a wait on S blocks the host in the library.
    queues                 BackendChannel.pending and Engine.defer: an operation that may not start yet holds
                           up later ones on the same group and library. Off: they overtake it.
    stream_per_group       a Channel of a stream library has a stream of its own. Off: one for all groups.
    messages_queue         a send or receive on a stream library is queued like a collective. Off: it
                           overtakes deferred collectives (Operation._bind_p2p), as it may on H, where
                           messages are matched by peer and tag.

Signature checks (`Program.checked`) are desync.compare_signatures: an operation is deferred until all its
members have posted it, and refused if one has posted another under its number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations, product
from random import Random
from typing import Final, Literal, NamedTuple

Library = Literal["H", "S"]
Verb = Literal["issue", "wait", "sync", "block"]
Outcome = Literal["fine", "deadlock", "mismatch", "refused"]

NEW: Final = 0  # not issued
DEFERRED: Final = 1  # issued and posted, in its queue
STARTED: Final = 2  # handed to the library
CONTRIBUTED: Final = 3  # H only: this rank's data is out, which took a poll after everyone had started
DONE: Final = 4


class Op(NamedTuple):
    """One operation; its number is its place in `Program.ops`.

    `after` is the number of an earlier operation that must be done first, on ranks that take part in the
    earlier one. `pair` makes the operation a message between two ranks of the group. `staged`: the tensors of
    an H operation are on the GPU, so it starts after the present work of the caller's stream
    (`stage_through_host`).
    """

    library: Library
    group: str
    after: int | None = None
    pair: tuple[int, int] | None = None
    staged: bool = True


class Step(NamedTuple):
    """The next action of a host.

    `wait` is `Work.wait`; `sync` polls `Work.is_completed` until it is; `block` is a synchronisation of the
    user's own (`torch.cuda.synchronize`, `.item()`), during which the library cannot poll.
    """

    verb: Verb
    op: int


@dataclass(frozen=True)
class Rules:
    one_order: bool = True
    issue_never_blocks: bool = True
    wait_progresses_all: bool = True
    queues: bool = True
    stream_per_group: bool = True
    messages_queue: bool = True


ALL_RULES: Final = Rules()


@dataclass(frozen=True)
class Program:
    """Groups by name, operations, and one script per rank; each script ends in `drain`."""

    groups: Mapping[str, tuple[int, ...]]
    ops: tuple[Op, ...]
    scripts: tuple[tuple[Step, ...], ...]
    checked: bool = False

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        return tuple(op.pair or self.groups[op.group] for op in self.ops)

    @cached_property
    def issued(self) -> tuple[tuple[int, ...], ...]:
        """Return each rank's operations in program order."""
        return tuple(tuple(step.op for step in script if step.verb == "issue") for script in self.scripts)

    @cached_property
    def on_stream(self) -> tuple[Mapping[int, tuple[int, ...]], ...]:
        """Per rank and operation, the S operations that the caller's stream waits for before it."""
        found = []
        for script in self.scripts:
            waited: list[int] = []
            before: dict[int, tuple[int, ...]] = {}
            for step in script:
                if step.verb == "issue":
                    op = self.ops[step.op]
                    before[step.op] = tuple(waited) if op.library == "S" or op.staged else ()
                elif self.ops[step.op].library == "S":
                    waited.append(step.op)
            found.append(before)
        return tuple(found)

    @cached_property
    def at_number(self) -> Mapping[tuple[int, str], Mapping[int, int]]:
        """Return the operations by sequence number, per rank and group; messages have no number."""
        found: dict[tuple[int, str], dict[int, int]] = {}
        for rank, issued in enumerate(self.issued):
            for group in self.groups:
                mine = [n for n in issued if self.ops[n].group == group and self.ops[n].pair is None]
                found[rank, group] = dict(enumerate(mine, 1))
        return found

    @cached_property
    def numbered(self) -> Mapping[tuple[int, int], int]:
        """(rank, operation) to its sequence number in its group."""
        return {(rank, op): n for (rank, _), numbers in self.at_number.items() for n, op in numbers.items()}

    def __str__(self) -> str:
        def name(step: Step) -> str:
            return f"{step.verb} {self.label(step.op)}"

        rows = [f"rank {rank}: " + ", ".join(map(name, script)) for rank, script in enumerate(self.scripts)]
        return "\n".join(rows)

    def label(self, number: int) -> str:
        """`#1 H(a) after #0`."""
        op = self.ops[number]
        after = "" if op.after is None else f" after #{op.after}"
        pair = "" if op.pair is None else " {}→{}".format(*op.pair)
        return f"#{number} {op.library}({op.group}{pair}){after}"


class RankState(NamedTuple):
    """`queues`: the operations handed to each library, per stream or communicator, in that order."""

    pc: int
    status: tuple[int, ...]
    queues: tuple[tuple[int, ...], ...]


State = tuple[RankState, ...]


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    states: int
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*self.trace, f"=> {self.outcome}"])


class MispairedError(Exception):
    """The library pairs two different operations: garbage."""


@dataclass
class Model:
    """The transitions of one program under some rules.

    `autonomous`: queues and libraries advance without any host; this ideal machine decides whether a program
    makes sense at all.
    """

    program: Program
    rules: Rules = ALL_RULES
    autonomous: bool = False
    _queue: tuple[int, ...] = field(init=False)
    _in_lane: tuple[bool, ...] = field(init=False)
    _lane: tuple[tuple[tuple[int, ...], ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        program, rules = self.program, self.rules
        shared = not rules.stream_per_group
        lines = [(op.library, "*" if shared and op.library == "S" else op.group) for op in program.ops]
        self._queue = tuple(sorted(set(lines)).index(line) for line in lines)
        self._in_lane = tuple(
            rules.queues and (op.pair is None or (op.library == "S" and rules.messages_queue))
            for op in program.ops
        )
        self._lane = tuple(
            tuple(self._neighbours(number, issued) for number in range(len(program.ops)))
            for issued in program.issued
        )

    def _neighbours(self, number: int, issued: Sequence[int]) -> tuple[int, ...]:
        """Return the operations that share a queue with this one, in program order."""
        ops = self.program.ops
        line = ops[number].library, ops[number].group
        return tuple(n for n in issued if self._in_lane[n] and (ops[n].library, ops[n].group) == line)

    def initial(self) -> State:
        empty = RankState(0, (NEW,) * len(self.program.ops), ((),) * len(set(self._queue)))
        return (empty,) * len(self.program.scripts)

    def finished(self, state: State) -> bool:
        scripts, issued = self.program.scripts, self.program.issued
        return all(
            here.pc == len(scripts[rank]) and all(here.status[op] == DONE for op in issued[rank])
            for rank, here in enumerate(state)
        )

    # -- starting ---------------------------------------------------------------------------------

    def _pending(self, state: State, rank: int, number: int) -> Sequence[int]:
        """Return the waiting operations in the queue of an operation."""
        status = state[rank].status
        return [other for other in self._lane[rank][number] if status[other] == DEFERRED]

    def _may_start(self, state: State, rank: int, number: int) -> bool:
        op, status = self.program.ops[number], state[rank].status
        if self.program.checked and op.pair is None and self._compare(state, rank, number) != "agreed":
            return False
        if op.after is not None and rank in self.program.members[op.after] and status[op.after] != DONE:
            return False
        if op.library == "H":  # on S the stream waits for these itself
            return all(status[other] == DONE for other in self.program.on_stream[rank][number])
        return True

    def _compare(self, state: State, rank: int, number: int) -> Literal["agreed", "waiting", "refused"]:
        """Compare the posts of the peers under this operation's sequence number."""
        mine, group = self.program.numbered[rank, number], self.program.ops[number].group
        answer: Literal["agreed", "waiting"] = "agreed"
        for peer in self.program.members[number]:
            theirs = self.program.at_number[peer, group].get(mine)
            if theirs is None or state[peer].status[theirs] == NEW:
                answer = "waiting"
            elif theirs != number:
                return "refused"
        return answer

    def refuses(self, state: State) -> bool:
        """Return whether a rank has seen a peer's different post: there the engine raises OrderMismatch."""
        return self.program.checked and any(
            here.status[number] == DEFERRED
            and self.program.ops[number].pair is None
            and self._compare(state, rank, number) == "refused"
            for rank, here in enumerate(state)
            for number in self.program.issued[rank]
        )

    def _start(self, state: State, rank: int, number: int) -> State:
        here, queue = state[rank], self._queue[number]
        queues = here.queues
        op = self.program.ops[number]
        if op.pair is None or op.library == "S":  # MPI's messages are matched by peer and tag, not by order
            handed = (*queues[queue], number)
            queues = (*queues[:queue], handed, *queues[queue + 1 :])
        here = RankState(here.pc, _with(here.status, number, STARTED), queues)
        state = (*state[:rank], here, *state[rank + 1 :])
        if op.pair is None:
            self._match(state, rank, number)
        return state

    def _match(self, state: State, rank: int, number: int) -> None:
        """A library pairs the n-th operation of a communicator with the peers' n-th."""
        mine = self._handed(state, rank, number)
        for peer in self.program.members[number]:
            theirs = self._handed(state, peer, number)
            if len(theirs) >= len(mine) and theirs[len(mine) - 1] != number:
                other = self.program.label(theirs[len(mine) - 1])
                raise MispairedError(
                    f"rank {rank}: {self.program.label(number)} paired with rank {peer}'s {other}"
                )

    def _handed(self, state: State, rank: int, number: int) -> Sequence[int]:
        ops = self.program.ops
        queue = state[rank].queues[self._queue[number]]
        return [other for other in queue if ops[other].group == ops[number].group and ops[other].pair is None]

    def _advance_lane(self, state: State, rank: int, number: int) -> State:
        if not self._in_lane[number]:
            return self._start(state, rank, number) if self._may_start(state, rank, number) else state
        for first in self._pending(state, rank, number):
            if not self._may_start(state, rank, first):
                break
            state = self._start(state, rank, first)
        return state

    # -- transitions ------------------------------------------------------------------------------

    def _host(self, state: State, rank: int) -> State | None:
        """Return the next step of a rank's script, if it can be taken."""
        here, script = state[rank], self.program.scripts[rank]
        if here.pc == len(script):
            return None
        verb, number = script[here.pc]
        moved = (*state[:rank], here._replace(pc=here.pc + 1), *state[rank + 1 :])
        status, library = here.status[number], self.program.ops[number].library
        if verb == "issue":
            if status != NEW:  # inside a blocking call
                return moved if status == DONE else None
            blocks = library == "H" and not self.rules.issue_never_blocks
            posted = here._replace(pc=here.pc + (not blocks), status=_with(here.status, number, DEFERRED))
            return self._advance_lane((*state[:rank], posted, *state[rank + 1 :]), rank, number)
        ordered = verb == "wait" and library == "S" and self.rules.wait_progresses_all
        return moved if status >= (STARTED if ordered else DONE) else None

    def _driven(self, state: State, rank: int) -> tuple[Callable[[int], bool], Callable[[int], bool]]:
        """Return the deferred operations that a rank starts, and the H operations that it polls."""
        here, script = state[rank], self.program.scripts[rank]
        if self.autonomous:
            return _everything, _everything
        verb, number = script[here.pc] if here.pc < len(script) else ("sync", self._draining(here, rank))
        if verb == "issue":
            if here.status[number] == NEW:
                return _nothing, _nothing
            return lambda op: op == number, lambda op: self.program.ops[op].library == "H"
        if verb == "block":
            return _nothing, _nothing
        if self.rules.wait_progresses_all:
            return _everything, _everything
        chain = [number]
        while (after := self.program.ops[chain[-1]].after) is not None:
            chain.append(after)
        queues = {self._queue[op] for op in chain}
        return lambda op: self._queue[op] in queues, chain.__contains__

    def _draining(self, here: RankState, rank: int) -> int:
        return next((op for op in self.program.issued[rank] if here.status[op] != DONE), 0)

    def _progress(self, state: State, rank: int) -> Iterator[tuple[str, State]]:
        """Return the possible advances of a polling rank: its queues, and its part in operations of H."""
        starts, polls = self._driven(state, rank)
        if starts is _nothing:
            return
        status = state[rank].status
        for number in self.program.issued[rank]:
            label = self.program.label(number)
            if status[number] == DEFERRED and starts(number):
                first = not self._in_lane[number] or self._pending(state, rank, number)[0] == number
                if first and self._may_start(state, rank, number):
                    yield f"rank {rank} starts {label}", self._start(state, rank, number)
            elif self.program.ops[number].library == "H" and status[number] in (STARTED, CONTRIBUTED):
                members = self.program.members[number]
                if polls(number) and all(state[peer].status[number] >= status[number] for peer in members):
                    after = CONTRIBUTED if status[number] == STARTED else DONE
                    here = state[rank]._replace(status=_with(status, number, after))
                    yield f"rank {rank} polls {label}", (*state[:rank], here, *state[rank + 1 :])

    def _streams(self, state: State) -> Iterator[tuple[str, State]]:
        """Return the stream operations that can run: first everywhere, with nothing left to wait for."""
        for number, op in enumerate(self.program.ops):
            members = self.program.members[number]
            if op.library == "S" and all(self._at_head(state, rank, number) for rank in members):
                done = tuple(
                    here._replace(status=_with(here.status, number, DONE)) if rank in members else here
                    for rank, here in enumerate(state)
                )
                yield f"stream runs {self.program.label(number)}", done

    def _at_head(self, state: State, rank: int, number: int) -> bool:
        here = state[rank]
        if here.status[number] != STARTED:
            return False
        head = next(op for op in here.queues[self._queue[number]] if here.status[op] != DONE)
        return head == number and all(here.status[op] == DONE for op in self.program.on_stream[rank][number])

    def _commutes(self, state: State, rank: int) -> bool:
        """Return whether a rank's next step is an issue that no other transition can affect."""
        here, script = state[rank], self.program.scripts[rank]
        if self.program.checked or here.pc == len(script) or script[here.pc].verb != "issue":
            return False
        number = script[here.pc].op
        op = self.program.ops[number]
        if here.status[number] != NEW or (op.library == "H" and self.program.on_stream[rank][number]):
            return False
        return op.after is None or self.program.ops[op.after].library == "H"

    def successors(self, state: State, *, reduced: bool = True) -> list[tuple[str, State]]:
        """Return all transitions; if `reduced`, a single one that commutes with all others and stays enabled.

        A stream operation that can run is such a transition, and most issues are. Polls and starts are not:
        the chance passes when the host moves on.
        """
        found = list(self._streams(state))
        if reduced and found:
            return found[:1]
        for rank in range(len(state)):
            if reduced and self._commutes(state, rank) and (after := self._host(state, rank)) is not None:
                return [(self._step(state, rank), after)]
        for rank in range(len(state)):
            if (after := self._host(state, rank)) is not None:
                found.append((self._step(state, rank), after))
            found.extend(self._progress(state, rank))
        return found

    def _step(self, state: State, rank: int) -> str:
        verb, number = self.program.scripts[rank][state[rank].pc]
        return f"rank {rank}: {verb} {self.program.label(number)}"

    def describe(self, state: State) -> str:
        """Describe the step of each rank in a deadlocked state."""
        words = {NEW: "not issued", DEFERRED: "deferred", STARTED: "started", CONTRIBUTED: "under way"}
        rows = []
        for rank, here in enumerate(state):
            script = self.program.scripts[rank]
            at = "drain"
            if here.pc < len(script):
                at = f"{script[here.pc].verb} {self.program.label(script[here.pc].op)}"
            left = [
                f"#{op} {words[here.status[op]]}"
                for op in self.program.issued[rank]
                if here.status[op] != DONE
            ]
            rows.append(f"rank {rank} stands at {at}: {', '.join(left) or 'all done'}")
        return "; ".join(rows)


def _with(status: tuple[int, ...], number: int, value: int) -> tuple[int, ...]:
    return (*status[:number], value, *status[number + 1 :])


def _everything(number: int) -> bool:
    return True


def _nothing(number: int) -> bool:
    return False


def check(program: Program, rules: Rules = ALL_RULES, *, reduced: bool = True) -> Verdict:
    """Explore every interleaving, breadth first: the trace of a deadlock or mismatch is a shortest one."""
    model = Model(program, rules)
    start = model.initial()
    cause: dict[State, tuple[State, str] | None] = {start: None}
    waiting = deque([start])
    refused: tuple[str, ...] = ()

    def trace(state: State, last: str) -> tuple[str, ...]:
        steps = [last]
        while (step := cause[state]) is not None:
            state = step[0]
            steps.append(step[1])
        return tuple(reversed(steps))

    while waiting:
        state = waiting.popleft()
        try:
            found = model.successors(state, reduced=reduced)
        except MispairedError as mismatch:
            return Verdict("mismatch", len(cause), trace(state, str(mismatch)))
        if not found and not model.finished(state):
            if not model.refuses(state):
                return Verdict("deadlock", len(cause), trace(state, model.describe(state)))
            refused = trace(state, model.describe(state))
        for label, after in found:
            if after not in cause:
                cause[after] = (state, label)
                waiting.append(after)
    if refused:
        return Verdict("refused", len(cause), refused)
    return Verdict("fine", len(cause))


def makes_sense(program: Program) -> bool:
    """Return whether the program would finish if all libraries and queues advanced by themselves.

    Nothing there ever disables anything else, so one run decides. Ranks that issue in different orders are
    left for `check` to judge.
    """
    model = Model(program, autonomous=True)
    state = model.initial()
    try:
        while found := model.successors(state):
            state = found[0][1]
    except MispairedError:
        return True
    return model.finished(state) or model.refuses(state)


# -- programs -------------------------------------------------------------------------------------

Mode = Literal["drain", "wait", "sync"]
"""When a rank waits for an operation: only at the end, or right after issuing it."""

_MODES: Final[Mapping[Library, tuple[Mode, ...]]] = {"H": ("drain", "wait"), "S": ("drain", "wait", "sync")}


def script(order: Sequence[int], modes: Mapping[int, Mode]) -> tuple[Step, ...]:
    """Issue in this order, waiting as `modes` says."""
    steps: list[Step] = []
    for number in order:
        steps.append(Step("issue", number))
        mode = modes[number]
        if mode != "drain":
            steps.append(Step(mode, number))
    return tuple(steps)


def operations(
    groups: Mapping[str, tuple[int, ...]], count: int, *, messages: bool
) -> Iterator[tuple[Op, ...]]:
    """Return all lists of `count` operations; at most one of them has an `after`.

    `messages`: with sends and receives between the first two ranks of a group, too.
    """
    libraries: tuple[Library, ...] = ("H", "S")
    for lines in product(product(libraries, groups, (False, True) if messages else (False,)), repeat=count):
        if not _canonical(groups, [group for _, group, _ in lines]):
            continue
        pairs = [(groups[g][0], groups[g][1]) if message else None for _, g, message in lines]
        plain = tuple(Op(library, g, pair=pair) for (library, g, _), pair in zip(lines, pairs, strict=True))
        yield plain
        for late in range(count):
            for early in range(late):
                if set(groups[plain[early].group]) & set(groups[plain[late].group]):
                    yield (*plain[:late], plain[late]._replace(after=early), *plain[late + 1 :])


def _canonical(groups: Mapping[str, tuple[int, ...]], used: Sequence[str]) -> bool:
    """Groups of the same members are interchangeable: they come into use in the order of their names."""
    return not any(
        other < group and groups[other] == groups[group] and other not in used[:index]
        for index, group in enumerate(used)
        for other in groups
    )


def orders(ops: Sequence[Op], mine: Sequence[int], *, one_order: bool) -> list[tuple[int, ...]]:
    """Return a rank's orders of issue: `after` points back; a group keeps its order if `one_order`."""

    def allowed(order: tuple[int, ...]) -> bool:
        place = {number: index for index, number in enumerate(order)}
        for late in order:
            after = ops[late].after
            if after is not None and place.get(after, -1) > place[late]:
                return False
            if one_order and any(
                early < late and ops[early].group == ops[late].group and place[early] > place[late]
                for early in order
            ):
                return False
        return True

    return [order for order in permutations(mine) if allowed(order)]


def scripts(ops: Sequence[Op], mine: Sequence[int], *, one_order: bool) -> list[tuple[Step, ...]]:
    """Return every way to issue a rank's operations and wait for each at once or only at the end.

    The last one is left to `drain`, which would be the next step anyway.
    """
    return [
        script(order, dict(zip(order, (*modes, "drain"), strict=True)))
        for order in orders(ops, mine, one_order=one_order)
        for modes in product(*(_MODES[ops[number].library] for number in order[:-1]))
        if order
    ] or [()]


def programs(
    groups: Mapping[str, tuple[int, ...]],
    count: int,
    *,
    one_order: bool = True,
    checked: bool = False,
    messages: bool = False,
) -> Iterator[Program]:
    """Every program of `count` operations that makes sense.

    Rank 0 issues in the order of the list: the others' orders are relative to it.
    """
    ranks = 1 + max(max(members) for members in groups.values())
    for ops in operations(groups, count, messages=messages):
        each = []
        for rank in range(ranks):
            mine = [number for number, op in enumerate(ops) if rank in (op.pair or groups[op.group])]
            found = scripts(ops, mine, one_order=one_order)
            if rank == 0:
                found = [steps for steps in found if [s.op for s in steps if s.verb == "issue"] == mine]
            each.append(found)
        for chosen in product(*each):
            program = Program(groups, ops, chosen, checked)
            if makes_sense(program):
                yield program


def spmd_programs(
    groups: Mapping[str, tuple[int, ...]], count: int, *, checked: bool = False
) -> Iterator[Program]:
    """Return every program of `count` collectives in which all ranks, members of all groups, do the same."""
    ranks = len(next(iter(groups.values())))
    order = list(range(count))
    for ops in operations(groups, count, messages=False):
        for steps in scripts(ops, order, one_order=True):
            program = Program(groups, ops, (steps,) * ranks, checked)
            if program.issued[0] == tuple(order) and makes_sense(program):
                yield program


def sample(groups: Mapping[str, tuple[int, ...]], count: int, random: Random) -> Program:
    """Return a random program that makes sense: waits anywhere, messages, signature checks, CPU tensors."""
    ranks = range(1 + max(max(members) for members in groups.values()))
    while True:
        ops = tuple(_random_op(groups, number, random) for number in range(count))
        program = Program(
            groups,
            ops,
            tuple(_random_script(groups, ops, rank, random) for rank in ranks),
            random.random() < 0.5,
        )
        if makes_sense(program):
            return program


def _random_op(groups: Mapping[str, tuple[int, ...]], number: int, random: Random) -> Op:
    group = random.choice(sorted(groups))
    first, second = random.sample(groups[group], 2)
    return Op(
        random.choice(("H", "S")),
        group,
        after=random.randrange(number) if number and random.random() < 0.3 else None,
        pair=(first, second) if random.random() < 0.2 else None,
        staged=random.random() < 0.5,
    )


def _random_script(
    groups: Mapping[str, tuple[int, ...]], ops: Sequence[Op], rank: int, random: Random
) -> tuple[Step, ...]:
    mine = [number for number, op in enumerate(ops) if rank in (op.pair or groups[op.group])]
    steps = [Step("issue", number) for number in random.choice(orders(ops, mine, one_order=True))]
    for number in mine:
        if random.random() < 0.5:
            place = random.randint(steps.index(Step("issue", number)) + 1, len(steps))
            steps.insert(place, Step(random.choice(("wait", "sync")), number))
    return tuple(steps)
