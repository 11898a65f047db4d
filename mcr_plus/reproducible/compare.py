"""Find the first operation at which two runs part, in the files of their digests.

Each rank's operations are compared stream by stream, in their order. Where a rank first parts from its twin,
its computation has differed if the input does; the library, or another rank, if only the output does. So the
runs part at an operation whose input differs on a rank that had not parted before, or whose output differs
although no rank's input does; all else follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from mcr_plus.errors import ConfigError, phrase_ranks
from mcr_plus.reproducible import digest_file as files
from mcr_plus.reproducible.digest_file import BUCKETS, DONE, INPUT, OUTPUT, ROW, CallOfProgram, RankDigests

What = Literal["call", "input", "output", "end"]
"""The operation itself, its input or its output differs; or one run has no such operation."""
Files = dict[int, Path]
Found = dict[int, "tuple[Parting | None, dict[str, NDArray[Any]]]"]
"""By rank: its first parting, and by stream the numbers of operations whose inputs differ."""
_ON_ALL: Final = ("all_reduce", "broadcast")
"""Kinds whose result is the same for any number of ranks."""


@dataclass(frozen=True)
class ComparedOperation:
    """An operation of one run: its name, and the library and line of the program, where they are known."""

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


@dataclass
class Parting:
    """An operation at which the runs part.

    Attributes:
        what: what differs first. ranks: the ranks on which it does.
        others: ranks that part at the same operation in another way, which follows from these.
        operations: the operation in A and in B, on one of the ranks; None in a run without it.
        index: its number among all operations of the rank.
        has_inputs: whether inputs are compared, as the group has the same size in both runs.
    """

    world: files.World
    stream: str
    number: int
    what: What
    ranks: list[int]
    operations: list[ComparedOperation | None]
    index: int
    kind: str
    dtype: str
    has_inputs: bool
    others: list[int] = field(default_factory=list)
    elements: list[Elements] = field(default_factory=list)

    def order(self) -> tuple[bool, int, int]:
        """Return a key by which partings are in order; the end of a run says least."""
        return self.what == "end", self.index, self.ranks[0]


@dataclass
class Comparison:
    """The result: how many operations were equal until `first`, and what was not compared."""

    operations: int = 0
    first: Parting | None = None
    notes: list[str] = field(default_factory=list)


def compare(one: Path, other: Path, keep: int = 8) -> Comparison:
    """Compare the digests of two runs, with `keep` of the elements that differ.

    Raises `ConfigError` if there are no digests, or they cannot be read.
    """
    if one.resolve() == other.resolve():
        raise ConfigError(f"{other}: expected the folder of another run than {one}")
    runs, result = (files.worlds_in(one), files.worlds_in(other)), Comparison()
    for world in sorted({*runs[0], *runs[1]}):
        paths = [run.get(world, {}) for run in runs]
        if not paths[0] or not paths[1]:
            result.notes.append("only run {} has job {}, epoch {}".format("AB"[not paths[0]], *world))
        elif result.first is None:
            _compare_world(world, paths, result, keep)
    if not runs[0].keys() & runs[1].keys():
        raise ConfigError(f"nothing can be compared: {'; '.join(result.notes)}")
    return result


def _compare_world(world: files.World, paths: list[Files], result: Comparison, keep: int) -> None:
    found: Found = {}
    about: list[Any] = [None, None]
    notes: dict[str, list[int]] = {}
    for rank in sorted(paths[0].keys() & paths[1].keys()):
        pair = [files.load(each[rank]) for each in paths]
        for at, digests in enumerate(pair):
            of = digests.about
            about[at] = about[at] or of
            if (of.job, of.rank, of.size) != (about[at].job, rank, about[at].size):
                raise ConfigError(f"{paths[at][rank]}: of another job than the files beside it")
            if not digests.ended:
                notes.setdefault(f"run {'AB'[at]} was killed, or goes on", []).append(rank)
        found[rank] = _compare_rank(world, rank, pair, notes, result)
    if not found:
        names = (phrase_ranks(list(each)) for each in paths)
        raise ConfigError("no rank has files in both runs: {} in A, {} in B".format(*names))
    for letter, each, of in zip("AB", paths, about, strict=True):
        if missing := sorted(set(range(of.size)) - each.keys()):
            notes[f"no file in run {letter}"] = missing
    result.notes += [f"{phrase_ranks(ranks)}: {text}" for text, ranks in notes.items()]
    if about[0].size != about[1].size:
        sizes = f"{about[0].size} ranks in A, {about[1].size} in B"
        result.notes.append(f"{sizes}: in groups of other sizes only {' and '.join(_ON_ALL)} are compared")
    result.first = _first_of(found)
    if result.first is not None:
        result.first.elements = _elements(result.first, paths, keep)


def _compare_rank(
    world: files.World, rank: int, runs: list[RankDigests], notes: dict[str, list[int]], result: Comparison
) -> tuple[Parting | None, dict[str, NDArray[Any]]]:
    texts: dict[str, int] = {}
    facts = [
        np.array([(texts.setdefault(c.text, len(texts)), c.ranks, c.kind in _ON_ALL) for c in run.calls])
        for run in runs
    ]
    partings: list[Parting] = []
    inputs: dict[str, NDArray[Any]] = {}
    streams = [_by_stream(run) for run in runs]
    for stream in dict.fromkeys([*streams[0], *streams[1]]):
        rows = [each.get(stream, np.empty(0, ROW)) for each in streams]
        shortest, longest = sorted(map(len, rows))
        x, y = (each[:shortest] for each in rows)
        a, b = (of[each["call"]].reshape(-1, 3) for of, each in zip(facts, (x, y), strict=True))
        both, alike, gap = x["flags"] & y["flags"], a[:, 1] == b[:, 1], x["number"] != y["number"]
        counted = alike | (a[:, 2] == 1)
        differs = {
            "end": gap,  # of a killed rank, an operation may be missing before others
            "call": (a[:, 0] != b[:, 0]) | counted & (x["elements"] != y["elements"]),
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
        lacks = -1  # the run without it
        if what == "undone":
            lacks = int(x["flags"][at] & DONE)
        elif what == "end":
            lacks = int(x["number"][at] < y["number"][at] if at < shortest else len(rows[1]) < len(rows[0]))
        seen = [
            None if number == lacks else (run.calls[each["call"][at]], each[at])
            for number, (run, each) in enumerate(zip(runs, rows, strict=True))
        ]
        pair: list[ComparedOperation | None] = [each and _operation(*each) for each in seen]
        if what == "call" and stream.endswith(BUCKETS):
            text = " in A, ".join(each.text for each in pair if each)
            notes.setdefault(f"other buckets, not compared from {text} in B", []).append(rank)
            continue
        call, row = next(each for each in seen if each)
        named, number, index = (
            cast("What", what.replace("undone", "end")),
            int(row["number"]),
            int(row["index"]),
        )
        has_inputs = at >= shortest or bool(alike[at])
        partings.append(
            Parting(world, stream, number, named, [rank], pair, index, call.kind, call.dtype, has_inputs)
        )
    return min(partings, key=Parting.order, default=None), inputs


def _operation(call: CallOfProgram, row: Any) -> ComparedOperation:
    number, elements = int(row["number"]), int(row["elements"])
    name = f"operation {number} of '{call.stream}' ({call.text}, {elements:,} elements)"
    return ComparedOperation(name, call.how, call.site)


def _by_stream(digests: RankDigests) -> dict[str, NDArray[Any]]:
    """Return a rank's rows by stream, in the order of their numbers."""
    names = list(dict.fromkeys(call.stream for call in digests.calls))
    of_call = np.array([names.index(call.stream) for call in digests.calls], int)
    parts = [digests.rows[of_call[digests.rows["call"]] == at] for at in range(len(names))]
    return {name: part[np.argsort(part["number"])] for name, part in zip(names, parts, strict=True)}


def _first_of(found: Found) -> Parting | None:
    """Return the first parting of all ranks, merged over the ranks of its operation."""
    partings = [first for first, _ in found.values() if first is not None]

    def follows(parting: Parting) -> bool:
        """Return whether it follows from another rank's input, or a sender's."""
        from_others = any(parting.number in inputs.get(parting.stream, ()) for _, inputs in found.values())
        return parting.what == "output" and (parting.kind == "recv" or from_others)

    order = sorted(partings, key=lambda each: (each.what == "end", follows(each), each.order()))
    for each in order[1:]:
        first = order[0]
        if each.kind not in ("send", "recv") and (each.stream, each.number) == (first.stream, first.number):
            (first.ranks if each.what == first.what else first.others).extend(each.ranks)
    return order[0] if order else None


def _elements(first: Parting, paths: list[Files], most: int) -> list[Elements]:
    """Return the elements that differ on each rank, if both runs have kept them."""
    found, dtype = [], getattr(torch, first.dtype, torch.uint8)
    for rank in first.ranks:
        kept = [files.kept_file(each[rank], first.stream, first.number, first.what) for each in paths]
        if all(each.exists() for each in kept):
            raw = [np.fromfile(each, np.uint8) for each in kept]
            length = min(map(len, raw)) // dtype.itemsize
            bits = [each[: length * dtype.itemsize].reshape(length, dtype.itemsize) for each in raw]
            at: list[int] = np.flatnonzero((bits[0] != bits[1]).any(1)).tolist()
            values = [torch.from_numpy(each[at[:most]]).view(dtype).flatten().tolist() for each in bits]
            shown = [(index, str(a), str(b)) for index, a, b in zip(at, *values, strict=False)]
            found.append(Elements(rank, len(at), length, shown))
    return found
