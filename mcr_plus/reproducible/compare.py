"""Find the first operation at which two runs part, in the files of their digests.

Each rank's operations are compared stream by stream, in their order. Where a rank first parts from its twin,
its computation has differed if the input does; the library, or another rank, if only the output does. So the
runs part at an operation whose input differs on a rank that had not parted before, or whose output differs
although no rank's input does; all else follows from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from mcr_plus.errors import ConfigError, phrase_ranks
from mcr_plus.reproducible.digest_file import (
    BUCKETS,
    DONE,
    INPUT,
    OUTPUT,
    ROW,
    CallOfProgram,
    RankDigests,
    World,
    kept_file,
    load,
    worlds_in,
)

What = Literal["call", "input", "output", "end"]
"""The operation itself, its input or its output differs; or one run has no such operation."""
_ORDER: Final = ("call", "input", "output", "end")
_ON_ALL: Final = ("all_reduce", "broadcast")
"""Kinds whose result is the same for any number of ranks."""
_SHOWN: Final = 8  # elements


@dataclass(frozen=True)
class Operation:
    """An operation of one run."""

    text: str
    how: str
    site: str


@dataclass(frozen=True)
class Elements:
    """The differing elements of a kept input or output: their number, and the first as (index, A, B)."""

    rank: int
    count: int
    of: int
    first: list[tuple[int, str, str]]


@dataclass(frozen=True)
class Parting:
    """The first difference of a rank, or of all ranks at one operation.

    Attributes:
        what: what differs first.
        ranks: the ranks on which it does.
        others: ranks that part at the same operation by its output, which follows from these.
        one, other: the operation in both runs, on the first of `ranks`; None in a run without it.
    """

    world: World
    stream: str
    number: int
    what: What
    ranks: list[int]
    others: list[int]
    one: Operation | None
    other: Operation | None
    index: int = field(repr=False)
    kind: str = field(repr=False)
    dtype: str = field(repr=False)
    elements: list[Elements] = field(default_factory=list)


@dataclass
class Comparison:
    """The result: how many operations were compared and equal until `first`, and what was not compared."""

    operations: int = 0
    first: Parting | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class _Rank:
    """A rank's first parting, and by stream the numbers of operations whose inputs differ."""

    first: Parting | None
    inputs: dict[str, NDArray[Any]]


def compare(one: Path, other: Path) -> Comparison:
    """Compare the digests of two runs. Raises `ConfigError` if there are none, or they cannot be read."""
    runs = worlds_in(one), worlds_in(other)
    result = Comparison()
    if not (common := [world for world in runs[0] if world in runs[1]]):
        raise ConfigError(f"{other}: has no {next(iter(runs[0]))}, which {one} has: nothing can be compared")
    for letter, mine, theirs in (("A", *runs), ("B", *reversed(runs))):
        result.notes += [
            f"only run {letter} has {world}: not compared" for world in mine if world not in theirs
        ]
    for world in common:
        _compare_world(world, runs[0][world], runs[1][world], result)
        if result.first is not None:
            break
    return result


def _compare_world(world: World, one: dict[int, Path], other: dict[int, Path], result: Comparison) -> None:
    found: dict[int, _Rank] = {}
    if not (common := [rank for rank in one if rank in other]):
        names = f"{phrase_ranks(list(one))} in A, {phrase_ranks(list(other))} in B"
        raise ConfigError(f"{world}: no rank has files in both runs ({names})")
    about: list[Any] = [None, None]
    notes: dict[str, list[int]] = {}
    for rank in common:
        pair = load(one[rank]), load(other[rank])
        for at, (letter, each) in enumerate(zip("AB", pair, strict=True)):
            if about[at] is None:
                about[at] = each.about
            if each.about.rank != rank or (each.about.job, each.about.size) != (
                about[at].job,
                about[at].size,
            ):
                raise ConfigError(
                    f"{each.path}: of another job than the files beside it; give each run a folder"
                )
            if not each.ended:
                notes.setdefault(f"has not ended in order in run {letter}", []).append(rank)
        found[rank] = _compare_rank(world, rank, pair, notes, result)
    for letter, files, each in (("A", one, about[0]), ("B", other, about[1])):
        if missing := sorted(set(range(each.size)) - files.keys()):
            result.notes.append(f"{phrase_ranks(missing)} of {each.size}: no file in run {letter}")
    if about[0].size != about[1].size:
        sizes = f"{about[0].size} ranks in A, {about[1].size} in B"
        result.notes.append(
            f"{sizes}: in groups of other sizes only results of {' and '.join(_ON_ALL)} are compared"
        )
    result.notes += [f"{phrase_ranks(ranks)}: {text}" for text, ranks in notes.items()]
    result.first = _first_of(found)
    if result.first is not None and result.first.what in ("input", "output"):
        result.first.elements.extend(_elements(result.first, one, other))


def _compare_rank(
    world: World,
    rank: int,
    runs: tuple[RankDigests, RankDigests],
    notes: dict[str, list[int]],
    result: Comparison,
) -> _Rank:
    streams = [_by_stream(run) for run in runs]
    numbers: dict[str, int] = {}
    facts = [_facts(run.calls, numbers) for run in runs]
    partings: list[Parting] = []
    inputs: dict[str, NDArray[Any]] = {}
    none = np.empty(0, ROW)
    for stream in dict.fromkeys([*streams[0], *streams[1]]):
        rows = [each.get(stream, none) for each in streams]
        shortest, longest = sorted(map(len, rows))
        x, y = (each[:shortest] for each in rows)
        (call, ranks, on_all), (other_call, other_ranks, _) = (
            of[each["call"]].T for of, each in zip(facts, (x, y), strict=True)
        )
        both, alike, gap = x["flags"] & y["flags"], ranks == other_ranks, x["number"] != y["number"]
        counted = alike | (on_all == 1)
        differs = {
            "end": gap,  # of a killed rank, an operation may be missing before others
            "call": (call != other_call) | counted & (x["elements"] != y["elements"]),
            "input": alike & (both & INPUT > 0) & (x["input"] != y["input"]),
            "output": counted & (both & OUTPUT > 0) & (x["output"] != y["output"]),
            "undone": (x["flags"] ^ y["flags"]) & DONE > 0,
        }
        inputs[stream] = x["number"][differs["input"] & ~gap]
        at = int(np.argmax(np.append(np.any(list(differs.values()), 0), True)))
        result.operations += at
        if at == longest:
            continue
        what = next((name for name in differs if at < shortest and differs[name][at]), "end")
        pair = [
            (run.calls[each["call"][at]], each[at]) if at < len(each) else None
            for run, each in zip(runs, rows, strict=True)
        ]
        if what == "call" and stream.endswith(BUCKETS):
            texts = " in A, ".join(_operation(*each).text for each in pair if each)
            notes.setdefault(f"other buckets, not compared from {texts} in B", []).append(rank)
            continue
        if what == "end" and pair[0] and pair[1]:
            pair[int(pair[0][1]["number"] < pair[1][1]["number"])] = None
        elif what == "undone":
            pair, what = [each if each and each[1]["flags"] & DONE else None for each in pair], "end"
        seen, row = next(each for each in pair if each)
        partings.append(
            Parting(
                world, stream, int(row["number"]), cast("What", what), [rank], [],
                *(None if each is None else _operation(*each) for each in pair),
                index=int(row["index"]), kind=seen.kind, dtype=seen.dtype,
            )
        )  # fmt: skip
    return _Rank(min(partings, key=_priority, default=None), inputs)


def _facts(calls: Sequence[CallOfProgram], numbers: dict[str, int]) -> NDArray[np.int64]:
    """Return for each call a number of its text, the ranks, and whether these do not affect its result."""
    facts = [
        (numbers.setdefault(call.text, len(numbers)), call.ranks, call.kind in _ON_ALL) for call in calls
    ]
    return np.array(facts, np.int64).reshape(-1, 3)


def _by_stream(digests: RankDigests) -> dict[str, NDArray[Any]]:
    """Return a rank's rows by stream, in the order of their numbers."""
    names = list(dict.fromkeys(call.stream for call in digests.calls))
    of_call = np.array([names.index(call.stream) for call in digests.calls], int)
    of_row = of_call[digests.rows["call"]]
    parts = {name: digests.rows[of_row == at] for at, name in enumerate(names)}
    return {name: part[np.argsort(part["number"], kind="stable")] for name, part in parts.items()}


def _operation(call: CallOfProgram, row: Any) -> Operation:
    return Operation(call.named(int(row["number"]), int(row["elements"])), call.how, call.site)


def _priority(parting: Parting) -> tuple[bool, int, int, int]:
    return parting.what == "end", parting.index, _ORDER.index(parting.what), parting.ranks[0]


def _first_of(found: dict[int, _Rank]) -> Parting | None:
    """Return the first parting of all ranks, merged over the ranks of its operation."""
    partings = [each.first for each in found.values() if each.first is not None]

    def follows(parting: Parting) -> bool:
        """Return whether it follows from another rank's input, or a sender's."""
        of_others = any(parting.number in each.inputs.get(parting.stream, ()) for each in found.values())
        return parting.what == "output" and (parting.kind == "recv" or of_others)

    first = min(
        partings, key=lambda each: (each.what == "end", follows(each), *_priority(each)), default=None
    )
    if first is None:
        return None
    same = [each for each in partings if (each.stream, each.number) == (first.stream, first.number)]
    if first.kind in ("send", "recv"):  # numbers of different messages
        same = [first]
    for each in same:
        (first.ranks if each.what == first.what else first.others).extend(
            each.ranks if each is not first else []
        )
    first.ranks.sort()
    return first


def _elements(parting: Parting, one: dict[int, Path], other: dict[int, Path]) -> Iterable[Elements]:
    """Yield the differing elements on each rank, if both runs have kept the operation."""
    dtype = getattr(torch, parting.dtype, torch.uint8)
    for rank in parting.ranks:
        files = [kept_file(each[rank], parting.stream, parting.number, parting.what) for each in (one, other)]
        if all(file.exists() for file in files):
            yield _differing(rank, *(_read(file, dtype) for file in files))


def _read(file: Path, dtype: torch.dtype) -> torch.Tensor:
    content = file.read_bytes()
    count = len(content) // dtype.itemsize
    return (
        torch.frombuffer(bytearray(content), dtype=dtype, count=count)
        if count
        else torch.empty(0, dtype=dtype)
    )


def _differing(rank: int, one: torch.Tensor, other: torch.Tensor) -> Elements:
    length = min(len(one), len(other))
    bits = [each[:length].view(torch.uint8).view(length, one.itemsize) for each in (one, other)]
    at: list[int] = (bits[0] != bits[1]).any(1).nonzero().flatten().tolist() if length else []
    first = [(index, str(one[index].item()), str(other[index].item())) for index in at[:_SHOWN]]
    return Elements(rank, len(at), length, first)
