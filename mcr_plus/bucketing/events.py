"""Discrete-event simulation of a step: computing ranks, queues of operations, and shared links.

Arrays contain one representative of equivalent ranks, queues or links, see `network`. Times are in seconds.
The next event is the end of an operation or of a rank's computation; all other events follow from these. One
indexed heap contains both kinds, so a step of E events takes O(E log E). When an operation begins or ends,
rates are recomputed only for operations that share links with it, directly or indirectly.

Long because the loop over events is one function, as numba needs it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcr_plus.kernels.cpu import compiled, linked

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

COMPUTE: Final = 0
ISSUE: Final = 1
WAIT: Final = 2
POLL: Final = 3

_COMPUTING: Final = 0
_BLOCKED: Final = 1
_ENDED: Final = 2
_CLOSE: Final = 1e-12  # relative tolerance of equal rates
# Share of a core that a waiting rank takes from others: its polls (0.1 to 0.15), and the time until the
# scheduler has found a core for those that compute. Fitted to `bench_plans.py --ranks 4` on two cores.
_WAITING: Final = 0.3


class Programs(NamedTuple):
    """Concatenated events of programs; program p has the events `begins[p]` to `begins[p + 1]`.

    `code`: kind of the event. `value`: seconds of computation. `slot`, `number`: the operation to issue or
    wait for, as the index of a queue of the rank, and the number in the queue.
    """

    begins: Ints
    code: Ints
    value: Floats
    slot: Ints
    number: Ints


class Queues(NamedTuple):
    """Concatenated operations of queues; queue q has the operations `begins[q]` to `begins[q + 1]`.

    `seconds`: duration when alone; `share`: share of a core during the operation; `busy[:, class]`: used
    fraction of links; `flow`: bytes per second of a message; `turn`: seconds of a message. Members of queue
    q, from `members[q]` on: `rank`, and the rank's `slot` for the queue. `by_caller`: operations begin only
    when each rank's program issues an operation, waits, or has a gradient ready. `connection`: equal for
    queues that share connections; a connection sends messages in order, including messages of issued
    operations that wait in the queue.
    """

    begins: Ints
    seconds: Floats
    share: Floats
    busy: Floats
    flow: Floats
    turn: Floats
    members: Ints
    rank: Ints
    slot: Ints
    by_caller: NDArray[np.bool_]
    connection: Ints


class LinkShares(NamedTuple):
    """Shared links: an entry is the use of one link by one queue.

    Entries of queue q begin at `of_queue[q]`. `by_link` contains the indices of entries by link; entries of a
    link begin at `of_link[link]`. `times`: number of equivalent queues on the link.
    """

    of_queue: Ints
    queue: Ints
    link: Ints
    kind: Ints
    times: Floats
    of_link: Ints
    by_link: Ints


class Ran(NamedTuple):
    """Result of a simulation. `starts`, `ends`: times of operations, NaN if they never ran.

    `cause`: last rank to arrive, and its event; -1 if the preceding operation caused the delay.
    `when[rank, event]`: end of an event, NaN if it was never reached. `blocked[rank, event]`: True if the
    event waited.
    """

    starts: Floats
    ends: Floats
    cause: Ints
    when: Floats
    blocked: NDArray[np.bool_]


def run(
    programs: Programs, of_rank: Ints, queue_of: Ints, queues: Queues, shares: LinkShares,
    node_of: Ints | None = None, cores: float = np.inf,
) -> Ran:  # fmt: skip
    """Simulate a step.

    Args:
        programs: programs of all ranks. of_rank: program of each rank. queue_of: [ranks, slots] of int64,
            queue of each slot, -1 for none. queues, shares: see `Queues` and `LinkShares`. node_of: node of
            each rank; None: one node. cores: of a node; if more of its ranks compute, they share them.
    """
    nodes = np.zeros(len(of_rank), np.int64) if node_of is None else node_of
    return Ran(*_run(programs, of_rank, queue_of, queues, shares, nodes, float(cores)))


def prepare() -> None:
    """Compile the kernels of a simulation, or load them from disk."""
    one, none = np.zeros(1, np.int64), np.zeros(0, np.int64)
    ends = np.array([0, 1], np.int64)
    programs = Programs(ends, one, np.zeros(1), one, one)
    by_caller = np.zeros(1, np.bool_)
    nothing = np.zeros(1)
    queues = Queues(
        ends, nothing, nothing, np.zeros((1, 3)), nothing, nothing, ends, one, one, by_caller, one
    )
    shares = LinkShares(np.zeros(2, np.int64), none, none, none, np.zeros(0), one, none)
    run(programs, one, np.zeros((1, 1), np.int64), queues, shares)


@linked
def _before(keys, one, other):  # type: ignore[no-untyped-def]
    return keys[one] < keys[other] or (keys[one] == keys[other] and one < other)


@linked
def _set(keys, heap, place, item, key):  # type: ignore[no-untyped-def]
    """Change the key of an item and restore the heap order."""
    keys[item] = key
    at = place[item]
    while at > 0:
        above = (at - 1) // 2
        if not _before(keys, item, heap[above]):
            break
        heap[at] = heap[above]
        place[heap[at]] = at
        at = above
    count = len(heap)
    while True:
        below = 2 * at + 1
        if below >= count:
            break
        if below + 1 < count and _before(keys, heap[below + 1], heap[below]):
            below += 1
        if not _before(keys, heap[below], item):
            break
        heap[at] = heap[below]
        place[heap[at]] = at
        at = below
    heap[at] = item
    place[item] = at


@linked
def _lowest_level(flow, speed, free, slope):  # type: ignore[no-untyped-def]
    """Return the lowest bytes per second at which an operation reaches full speed or a link is full."""
    level = np.inf
    for i in range(len(flow)):
        if speed[i] < 0.0:
            level = min(level, flow[i])
    for at in range(len(free)):
        if slope[at] > 0.0:
            level = min(level, free[at] / slope[at])
    return level


@linked
def _left_over(begins, link, need, flow, speed, free, slope):  # type: ignore[no-untyped-def]
    """Set `free` to the capacity that fixed speeds leave per link, `slope` to the others' need per level."""
    free[:] = 1.0
    slope[:] = 0.0
    for i in range(len(flow)):
        for k in range(begins[i], begins[i + 1]):
            if speed[i] >= 0.0:
                free[link[k]] = max(free[link[k]] - need[k] * speed[i], 0.0)
            else:
                slope[link[k]] += need[k] / flow[i]


@linked
def _stops(begins, link, need, free, slope, level, i):  # type: ignore[no-untyped-def]
    """Return whether a link of an operation is full at this level."""
    for k in range(begins[i], begins[i + 1]):
        if need[k] > 0.0 and free[link[k]] <= level * slope[link[k]]:
            return True
    return False


@compiled
def fill(begins, link, need, flow, links, speed):  # type: ignore[no-untyped-def]
    """Compute max-min fair speeds by progressive filling (Bertsekas, Gallager 1992, section 6.5.2).

    Messages of all operations get the same bytes per second until one reaches full speed or a link is full;
    then the other rates continue to grow. At full speed, operation i sends `flow[i]` bytes per second, and
    needs the fraction `need[k]` of `link[k]`, k from `begins[i]` to `begins[i + 1]`. `speed`: the result, 0
    to 1.
    """
    free, slope = np.ones(links), np.zeros(links)
    waiting = 0
    for i in range(len(flow)):
        full = flow[i] <= 0.0 or begins[i] == begins[i + 1]
        speed[i] = 1.0 if full else -1.0
        waiting += not full
    while waiting > 0:
        _left_over(begins, link, need, flow, speed, free, slope)
        level = _lowest_level(flow, speed, free, slope)
        limit = level * (1.0 + _CLOSE)
        for i in range(len(flow)):
            if speed[i] < 0.0 and (flow[i] <= limit or _stops(begins, link, need, free, slope, limit, i)):
                speed[i] = min(level / flow[i], 1.0)
                waiting -= 1


@linked
def _issued_turns(queues, issued, head, q):  # type: ignore[no-untyped-def]
    """Return the duration of one message of each operation in flight, i.e. issued by all members."""
    until = len(queues.seconds)
    for m in range(queues.members[q], queues.members[q + 1]):
        until = min(until, issued[queues.rank[m], queues.slot[m]])
    seconds = 0.0
    for operation in range(queues.begins[q] + head[q], queues.begins[q] + until):
        seconds += queues.turn[operation]
    return seconds


@linked
def _share_connections(  # type: ignore[no-untyped-def]
    queues, found, running, issued, head, flow, turns, most
):
    """Change the `flow` of the running queues `found` so that equal levels mean equal rates of connections.

    A connection sends messages in the order of posting, and every operation in flight has one message on it.
    So operations progress in proportion to the duration of their messages (round robin of messages). `turns`,
    `most`: scratch arrays by connection, all 0 before and after.
    """
    own = np.zeros(len(found))
    for i in range(len(found)):
        of = queues.connection[found[i]]
        own[i] = _issued_turns(queues, issued, head, found[i]) if running[found[i]] else 0.0
        turns[of] += own[i]
        most[of] = max(most[of], flow[i])
    for i in range(len(found)):
        of = queues.connection[found[i]]
        if 0.0 < own[i] < turns[of]:
            flow[i] = most[of] * turns[of] / own[i]
    for i in range(len(found)):
        of = queues.connection[found[i]]
        turns[of] = most[of] = 0.0


@compiled
def _mark(node_of, rank, is_dirty, dirty, changed):  # type: ignore[no-untyped-def]
    """Append the ranks on a rank's node to `dirty`; return its new length."""
    for other in range(len(node_of)):
        if node_of[other] == node_of[rank] and not is_dirty[other]:
            is_dirty[other] = True
            dirty[changed] = other
            changed += 1
    return changed


@compiled
def _run(programs, of_rank, queue_of, queues, shares, node_of, cores):  # type: ignore[no-untyped-def] # noqa: C901
    # One function: numba counts references to array arguments, and its parts share about forty arrays.
    ranks, slots = queue_of.shape
    count = len(queues.begins) - 1
    links = len(shares.of_link) - 1
    operations = len(queues.seconds)
    longest = 0
    for r in range(ranks):
        longest = max(longest, programs.begins[of_rank[r] + 1] - programs.begins[of_rank[r]])
    starts, ends = np.full(operations, np.nan), np.full(operations, np.nan)
    cause = np.full((operations, 2), -1, np.int64)
    when = np.full((ranks, longest), np.nan)
    blocked = np.zeros((ranks, longest), np.bool_)

    at = np.zeros(ranks, np.int64)  # current event of each rank
    state = np.full(ranks, _COMPUTING, np.int64)
    left, rate, since = np.zeros(ranks), np.ones(ranks), np.zeros(ranks)
    issued = np.zeros((ranks, slots), np.int64)
    arrived = np.zeros((ranks, slots), np.bool_)

    head = np.zeros(count, np.int64)  # number of completed operations per queue
    running = np.zeros(count, np.bool_)
    there = np.zeros(count, np.int64)  # number of arrived members
    rest, speed, seen = np.zeros(count), np.zeros(count), np.zeros(count)

    keys = np.full(count + ranks, np.inf)  # queues come first: of simultaneous events, operations end first
    heap = np.arange(count + ranks)
    place = np.arange(count + ranks)

    todo, more = np.arange(ranks)[::-1].copy(), ranks
    begin, beginning = np.zeros(count, np.int64), 0
    grown, growing = np.zeros(count, np.int64), 0  # running queues with a further issued operation
    has_grown = np.zeros(count, np.bool_)
    turns, most = np.zeros(count), np.zeros(count)  # by connection
    dirty, changed = np.zeros(ranks, np.int64), 0
    is_dirty = np.zeros(ranks, np.bool_)
    found, stamp = np.zeros(count, np.int64), np.zeros(count, np.int64)
    nearby, link_stamp = np.zeros(links, np.int64), np.zeros(links, np.int64)
    local = np.zeros(links, np.int64)
    active = np.zeros(ranks)  # computing ranks of each node, and shares of cores of waiting ones
    is_full = cores < ranks  # ranks of a node may have to share its cores
    turn = 0
    now = 0.0
    ended = -1  # queue whose operation has just ended
    while True:
        while more > 0:
            more -= 1
            r = todo[more]
            first = programs.begins[of_rank[r]]
            last = programs.begins[of_rank[r] + 1]
            polls = False
            while True:
                event = first + at[r]
                if event == last:
                    state[r] = _ENDED
                    polls = True
                    break
                code = programs.code[event]
                if code == COMPUTE:
                    if programs.value[event] > 0.0:
                        state[r] = _COMPUTING
                        left[r], since[r] = programs.value[event], now
                        active[node_of[r]] += 1
                        if is_full:
                            changed = _mark(node_of, r, is_dirty, dirty, changed)
                        elif not is_dirty[r]:
                            is_dirty[r] = True
                            dirty[changed] = r
                            changed += 1
                        break
                elif code == ISSUE:
                    issued[r, programs.slot[event]] += 1
                    polls = True
                    q = queue_of[r, programs.slot[event]]
                    if running[q] and not has_grown[q]:
                        has_grown[q] = True
                        grown[growing] = q
                        growing += 1
                elif code == WAIT:
                    polls = True
                    if head[queue_of[r, programs.slot[event]]] <= programs.number[event]:
                        state[r] = _BLOCKED
                        blocked[r, at[r]] = True
                        active[node_of[r]] += _WAITING
                        if active[node_of[r]] > cores:
                            changed = _mark(node_of, r, is_dirty, dirty, changed)
                        break
                else:
                    polls = True
                when[r, at[r]] = now
                at[r] += 1
            if polls:
                for s in range(slots):
                    q = queue_of[r, s]
                    if q >= 0 and not running[q] and not arrived[r, s] and issued[r, s] > head[q]:
                        arrived[r, s] = True
                        there[q] += 1
                        if there[q] == queues.members[q + 1] - queues.members[q]:
                            cause[queues.begins[q] + head[q], 0] = r
                            cause[queues.begins[q] + head[q], 1] = at[r]
                            begin[beginning] = q
                            beginning += 1

        # Update operations that begin, and operations that share links with them or with the ended operation
        turn += 1
        reached = 0
        for i in range(beginning):
            q = begin[i]
            running[q] = True
            there[q] = 0
            starts[queues.begins[q] + head[q]] = now
            rest[q], speed[q], seen[q] = 1.0, 0.0, now
            stamp[q] = turn
            found[reached] = q
            reached += 1
        beginning = 0
        if ended >= 0 and stamp[ended] != turn:
            stamp[ended] = turn
            found[reached] = ended
            reached += 1
        ended = -1
        for i in range(growing):
            q = grown[i]
            has_grown[q] = False
            if running[q] and stamp[q] != turn:
                stamp[q] = turn
                found[reached] = q
                reached += 1
        growing = 0
        if reached > 0:
            close = 0
            i = 0
            while i < reached:
                q = found[i]
                for k in range(shares.of_queue[q], shares.of_queue[q + 1]):
                    link = shares.link[k]
                    if link_stamp[link] != turn:
                        link_stamp[link] = turn
                        local[link] = close
                        nearby[close] = link
                        close += 1
                        for m in range(shares.of_link[link], shares.of_link[link + 1]):
                            other = shares.queue[shares.by_link[m]]
                            if running[other] and stamp[other] != turn:
                                stamp[other] = turn
                                found[reached] = other
                                reached += 1
                i += 1
            if close > 0:
                entries = 0
                for i in range(reached):
                    entries += shares.of_queue[found[i] + 1] - shares.of_queue[found[i]]
                bounds = np.zeros(reached + 1, np.int64)
                which, need = np.zeros(entries, np.int64), np.zeros(entries)
                flow, speeds = np.zeros(reached), np.ones(reached)
                entries = 0
                for i in range(reached):
                    q = found[i]
                    if running[q]:
                        operation = queues.begins[q] + head[q]
                        flow[i] = queues.flow[operation]
                        for k in range(shares.of_queue[q], shares.of_queue[q + 1]):
                            used = queues.busy[operation, shares.kind[k]] * shares.times[k]
                            if used > 0.0:
                                which[entries] = local[shares.link[k]]
                                need[entries] = used
                                entries += 1
                    bounds[i + 1] = entries
                _share_connections(queues, found[:reached], running, issued, head, flow, turns, most)
                fill(bounds, which, need, flow, close, speeds)
            else:
                speeds = np.ones(reached)
            for i in range(reached):
                q = found[i]
                if not running[q] or speeds[i] == speed[q]:
                    continue
                operation = queues.begins[q] + head[q]
                seconds = queues.seconds[operation]
                if speed[q] > 0.0 and seconds > 0.0:
                    rest[q] = max(rest[q] - speed[q] * (now - seen[q]) / seconds, 0.0)
                speed[q], seen[q] = speeds[i], now
                end = now + rest[q] * seconds / speeds[i] if speeds[i] > 0.0 else np.inf
                _set(keys, heap, place, q, end)
                if queues.share[operation] > 0.0:
                    for m in range(queues.members[q], queues.members[q + 1]):
                        r = queues.rank[m]
                        if not is_dirty[r]:
                            is_dirty[r] = True
                            dirty[changed] = r
                            changed += 1

        for i in range(changed):
            r = dirty[i]
            is_dirty[r] = False
            if state[r] != _COMPUTING:
                continue
            taken = 0.0
            for s in range(slots):
                q = queue_of[r, s]
                if q >= 0 and running[q]:
                    taken += speed[q] * queues.share[queues.begins[q] + head[q]]
            left[r] = max(left[r] - rate[r] * (now - since[r]), 0.0)
            rate[r], since[r] = max(1.0 - taken, 0.0), now
            if active[node_of[r]] > cores:
                rate[r] *= cores / active[node_of[r]]
            _set(keys, heap, place, count + r, now + left[r] / rate[r] if rate[r] > 0.0 else np.inf)
        changed = 0

        item = heap[0]
        now_next = keys[item]
        if now_next == np.inf:
            break
        now = now_next
        _set(keys, heap, place, item, np.inf)
        if item >= count:
            r = item - count
            when[r, at[r]] = now
            at[r] += 1
            left[r] = 0.0
            todo[more] = r
            more += 1
            active[node_of[r]] -= 1
            if is_full:
                changed = _mark(node_of, r, is_dirty, dirty, changed)
            continue
        q = item
        operation = queues.begins[q] + head[q]
        ends[operation] = now
        running[q] = False
        ended = q
        shared = queues.share[operation] > 0.0
        head[q] += 1
        for m in range(queues.members[q], queues.members[q + 1]):
            r, s = queues.rank[m], queues.slot[m]
            arrived[r, s] = False
            if shared and not is_dirty[r]:
                is_dirty[r] = True
                dirty[changed] = r
                changed += 1
            if issued[r, s] > head[q] and (not queues.by_caller[q] or state[r] != _COMPUTING):
                arrived[r, s] = True
                there[q] += 1
        if there[q] > 0 and there[q] == queues.members[q + 1] - queues.members[q]:
            begin[beginning] = q
            beginning += 1
        for m in range(queues.members[q], queues.members[q + 1]):
            r = queues.rank[m]
            if state[r] == _BLOCKED:
                event = programs.begins[of_rank[r]] + at[r]
                waited = queue_of[r, programs.slot[event]]
                if waited == q and head[q] > programs.number[event]:
                    state[r] = _COMPUTING
                    if active[node_of[r]] > cores:
                        changed = _mark(node_of, r, is_dirty, dirty, changed)
                    active[node_of[r]] -= _WAITING
                    when[r, at[r]] = now
                    at[r] += 1
                    left[r], since[r] = 0.0, now
                    todo[more] = r
                    more += 1
    return starts, ends, cause, when, blocked
