"""Wrong plans: parts of all ranks in one exchange, or native collectives, with one mistake in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mcr_plus.layout import proof
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.messages import BoxRows, ExchangePart, KeptBoxes
from mcr_plus.layout.native import NativeCollective, NativeKind
from mcr_plus.layout.regions import Boxes

Parts = dict[int, ExchangePart]
Side = Literal["sends", "receives"]
Ints = NDArray[np.int64]


def found(parts: Mapping[int, ExchangePart], source: Layout, target: Layout) -> str | None:
    """Return the error of the ranks' proofs of an exchange, asked like `plan`; None without an error."""
    ranks = np.array(sorted(parts))
    for part in parts.values():
        wrong = proof.check(part, source, target)
        if wrong is not None:
            return wrong
    sent = np.stack([proof.digests(parts[rank].sends, ranks) for rank in ranks.tolist()])
    expected = np.stack([proof.digests(parts[rank].receives, ranks) for rank in ranks.tolist()])
    return None if (sent == expected.T).all() else "senders and receivers differ"


def mutants(
    parts: Mapping[int, ExchangePart], source: Layout, target: Layout, random: np.random.Generator
) -> Iterator[tuple[str, Parts]]:
    """Return one mistake of each kind possible in this exchange, at random places, with its name."""
    owners = {"receives": target.owners, "sends": source.owners}
    counts = {"receives": len(target.owners), "sends": len(source.owners)}
    ranks = sorted(parts)
    sending = [rank for rank in ranks if len(parts[rank].sends.peers)]
    receiving = [rank for rank in ranks if len(parts[rank].receives.peers)]
    keeping = [rank for rank in ranks if len(parts[rank].kept.addends)]

    def pick(some: list[int]) -> int:
        return some[int(random.integers(len(some)))]

    sides: list[tuple[Side, list[int]]] = [("sends", sending), ("receives", receiving)]
    for side, some in sides:
        if not some:
            continue
        rank = pick(some)
        rows: BoxRows = getattr(parts[rank], side)
        at = int(random.integers(len(rows.peers)))
        number = np.arange(len(rows.peers))
        yield f"{side}: dropped", _with(parts, rank, side, rows.take(number != at))
        yield f"{side}: doubled", _with(parts, rank, side, rows.take(np.sort(np.append(number, at))))
        yield f"{side}: another addend", _with(parts, rank, side, _addend(rows, at))
        for peer in {pick(ranks), max(ranks) + 1} - {int(rows.peers[at])}:
            moved = rows.peers.copy()
            moved[at] = peer
            yield f"{side}: another peer", _with(parts, rank, side, rows._replace(peers=moved))
        for name, changed in _shifted(rows.boxes, at, source.shape):
            yield f"{side}: {name}", _with(parts, rank, side, rows._replace(boxes=changed))
        others = rows.peers == rows.peers[at]
        others &= ~_like(rows, at)  # where a rank lists overlapping boxes, it gets elements twice
        if others.any():
            other = int(random.choice(others.nonzero()[0]))
            swap = number.copy()
            swap[[at, other]] = other, at
            yield f"{side}: two swapped", _with(parts, rank, side, rows.take(swap))
        for piece in range(counts[side]):
            if piece != rows.pieces[at] and not _is_as_good(source, target, side, rows, at, piece, rank):
                pieces = rows.pieces.copy()
                pieces[at] = piece
                what = "own" if owners[side][piece] == rank else "foreign"
                yield f"{side}: another box, {what}", _with(parts, rank, side, rows._replace(pieces=pieces))
                break
    if sending:
        yield from _of_both(parts, pick(sending), source.shape, target, random)
    if keeping:
        rank = pick(keeping)
        yield from _of_kept(parts, rank, source, target, random)


def _like(rows: BoxRows, at: int) -> NDArray[np.bool_]:
    """Return the rows of the same box and addend."""
    words = np.column_stack([rows.addends, *rows.boxes])
    return np.asarray((words == words[at]).all(axis=1), bool)


def _is_as_good(
    source: Layout, target: Layout, side: Side, rows: BoxRows, at: int, piece: int, rank: int
) -> bool:
    """Return whether a row could also come from another box of the rank: a source may hold elements twice."""
    layout = source if side == "sends" else target
    inside = (layout.held.lows[piece] <= rows.boxes.lows[at]).all() and (
        rows.boxes.highs[at] <= layout.held.highs[piece]
    ).all()
    return side == "sends" and bool(
        inside and layout.owners[piece] == rank and layout.addends[piece] == rows.addends[at]
    )


def _of_both(
    parts: Mapping[int, ExchangePart],
    sender: int,
    shape: tuple[int, ...],
    target: Layout,
    random: np.random.Generator,
) -> Iterator[tuple[str, Parts]]:
    """Mistakes that sender and receiver share, so that their lists are equal."""
    rows = parts[sender].sends
    at = int(random.integers(len(rows.peers)))
    receiver = int(rows.peers[at])
    theirs = parts[receiver].receives
    place = int((theirs.peers == sender).nonzero()[0][0] + (rows.peers[:at] == receiver).sum())

    def both(change: Callable[[BoxRows, int], BoxRows]) -> Parts:
        first = _with(parts, sender, "sends", change(rows, at))
        return _with(first, receiver, "receives", change(theirs, place))

    yield "both: dropped", both(lambda some, one: some.take(np.arange(len(some.peers)) != one))
    double = both(lambda some, one: some.take(np.sort(np.append(np.arange(len(some.peers)), one))))
    yield "both: doubled", double
    yield "both: another addend", both(_addend)
    for index, (name, _) in enumerate(_shifted(rows.boxes, at, shape)):

        def shifted(some: BoxRows, one: int, index: int = index) -> BoxRows:
            return some._replace(boxes=list(_shifted(some.boxes, one, shape))[index][1])

        yield f"both: {name}", both(shifted)
    # A row is received twice, the second time into a box of another rank.
    (foreign,) = (target.owners != receiver).nonzero()
    if len(foreign):
        again = double[receiver].receives
        pieces = again.pieces.copy()
        pieces[place + 1] = foreign[0]
        yield (
            "both: doubled into a foreign box",
            _with(double, receiver, "receives", again._replace(pieces=pieces)),
        )


def _of_kept(
    parts: Mapping[int, ExchangePart], rank: int, source: Layout, target: Layout, random: np.random.Generator
) -> Iterator[tuple[str, Parts]]:
    kept = parts[rank].kept
    at = int(random.integers(len(kept.addends)))
    number = np.arange(len(kept.addends))

    def changed(new: KeptBoxes) -> Parts:
        return {**parts, rank: replace(parts[rank], kept=new)}

    def taken(which: Ints) -> KeptBoxes:
        return KeptBoxes(kept.boxes.take(which), kept.addends[which], kept.pieces[which], kept.into[which])

    yield "kept: dropped", changed(taken(number[number != at]))
    yield "kept: doubled", changed(taken(np.append(number, at)))
    addends = kept.addends.copy()
    addends[at] += 1
    yield "kept: another addend", changed(kept._replace(addends=addends))
    for name, boxes in _shifted(kept.boxes, at, source.shape):
        yield f"kept: {name}", changed(kept._replace(boxes=boxes))
    low, high = kept.boxes.lows[at], kept.boxes.highs[at]
    for piece in range(len(source.owners)):
        holds = (source.held.lows[piece] <= low).all() and (high <= source.held.highs[piece]).all()
        if not (holds and source.owners[piece] == rank and source.addends[piece] == kept.addends[at]):
            pieces = kept.pieces.copy()
            pieces[at] = piece
            what = "own" if source.owners[piece] == rank else "foreign"
            yield f"kept: from another box, {what}", changed(kept._replace(pieces=pieces))
            break
    for piece in range(len(target.owners)):
        if piece != kept.into[at]:
            into = kept.into.copy()
            into[at] = piece
            what = "own" if target.owners[piece] == rank else "foreign"
            yield f"kept: into another box, {what}", changed(kept._replace(into=into))
            extra = taken(np.append(number, at))
            into = extra.into.copy()
            into[-1] = piece
            yield f"kept: twice, into another box, {what}", changed(extra._replace(into=into))
            break


def _with(parts: Mapping[int, ExchangePart], rank: int, side: Side, rows: BoxRows) -> Parts:
    changed = replace(parts[rank], sends=rows) if side == "sends" else replace(parts[rank], receives=rows)
    return {**parts, rank: changed}


def _addend(rows: BoxRows, at: int) -> BoxRows:
    addends = rows.addends.copy()
    addends[at] = addends[at] - 1 if addends[at] else 1
    return rows._replace(addends=addends)


def _shifted(boxes: Boxes, at: int, shape: tuple[int, ...]) -> Iterator[tuple[str, Boxes]]:
    """Return a box that lies elsewhere, or is smaller or larger by one."""
    for dim in range(len(shape)):
        for name, low, high in (("shifted", 1, 1), ("shifted", -1, -1), ("larger", 0, 1), ("smaller", 1, 0)):
            lows, highs = boxes.lows.copy(), boxes.highs.copy()
            lows[at, dim] += low
            highs[at, dim] += high
            yield f"{name} in dimension {dim}", Boxes(lows, highs)


# -- native collectives ---------------------------------------------------------------------------


def native_mutants(native: NativeCollective) -> Iterator[tuple[str, NativeCollective]]:
    """Return all mistakes of a native collective in its kind, group or members."""
    groups = native.groups
    kinds: tuple[NativeKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
    for kind in kinds:
        if kind != native.kind:
            yield f"{kind} instead", replace(native, kind=kind)
    first, others = groups[0], groups[1:]
    yield "a group dropped", replace(native, groups=others)
    yield "a group twice", replace(native, groups=(first, *groups))
    stranger = 1 + max(max(group) for group in groups)
    for at, group in enumerate(groups):

        def changed(*new: tuple[int, ...], at: int = at) -> NativeCollective:
            return replace(native, groups=(*groups[:at], *new, *groups[at + 1 :]))

        yield "a member dropped", changed(group[:-1])
        yield "a member twice", changed((*group, group[0]))
        yield "a stranger", changed((*group, stranger))
        yield "a stranger in place of a member", changed((stranger, *group[1:]))
        if len(group) > 1:
            yield "another order", changed((group[1], group[0], *group[2:]))
            yield "the order reversed", changed(group[::-1])
            yield "a group cut in two", changed(group[:1], group[1:])
        if at:
            before = groups[at - 1]
            joined = replace(native, groups=(*groups[: at - 1], before + group, *groups[at + 1 :]))
            yield "two groups joined", joined
            swapped = (*group[:1], *before[1:]), (*before[:1], *group[1:])
            yield "members swapped", replace(native, groups=(*groups[: at - 1], *swapped, *groups[at + 1 :]))
