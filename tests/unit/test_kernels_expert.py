"""Kernels of expert parallelism: lists against loops over tokens, rows against plain torch, formats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcr_plus.parallel import routing_kernels as lists_of
from mcr_plus.parallel import row_kernels as rows_of
from mcr_plus.parallel.row_kernels import Format, Lists, Wire

Lines = list[list[int]]


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[np.ndarray[Any, Any]], np.ndarray[Any, Any], int, int | None]:
    """Ids of every rank, owners, number of ranks, capacity."""
    ranks, experts, k = draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.integers(1, 4))
    owners = np.sort(np.array(draw(st.lists(st.integers(0, ranks - 1), min_size=experts, max_size=experts))))
    ids = [
        np.array(
            draw(st.lists(st.lists(st.integers(-1, experts - 1), min_size=k, max_size=k), max_size=6)),
            np.int64,
        ).reshape(-1, k)
        for _ in range(ranks)
    ]
    return ids, owners.astype(np.int64), ranks, draw(st.none() | st.integers(0, 4))


def kept(ids: np.ndarray[Any, Any], experts: int, capacity: int | None) -> set[tuple[int, int]]:
    """Choices (token, number) that find room."""
    found, taken = set(), [0] * experts
    for c in range(ids.shape[1]):
        for t in range(len(ids)):
            expert = ids[t, c]
            if expert >= 0 and (capacity is None or taken[expert] < capacity):
                taken[expert] += 1
                found.add((t, c))
    return found


@settings(max_examples=40)
@given(routings())
def test_lists_are_those_of_one_token_at_a_time(routing: Any) -> None:
    ids, owners, ranks, capacity = routing
    experts, k = len(owners), ids[0].shape[1]
    sent = [lists_of.sent(each, owners, ranks, rank, capacity) for rank, each in enumerate(ids)]
    chosen = [kept(each, experts, capacity) for each in ids]
    firsts = np.searchsorted(owners, np.arange(ranks + 1))
    for rank, (each, own) in enumerate(zip(ids, sent, strict=True)):
        assert own.bad == -1
        expected = [[int((each[:, c] == e).sum()) for e in range(experts)] for c in range(k)]
        assert own.load.tolist() == expected
        assert own.counts.tolist() == [sum(each[t, c] == e for t, c in chosen[rank]) for e in range(experts)]
        for to in range(ranks):
            travel = sorted({t for t, c in chosen[rank] if owners[each[t, c]] == to and to != rank})
            assert own.tokens[own.firsts[to] : own.firsts[to + 1]].tolist() == travel
        for t in range(len(each)):
            mine = own.token_rows[own.token_firsts[t] : own.token_firsts[t + 1]]
            assert all(own.tokens[mine] == t)
        assert len(own.token_rows) == len(own.tokens)
    for rank in range(ranks):
        local = range(firsts[rank], firsts[rank + 1])
        counts = np.array([[each.counts[e] for e in local] for each in sent], np.int64).reshape(ranks, -1)
        of_entries, places = [], []
        for source, each in enumerate(sent):
            bounds = np.concatenate([[0], np.cumsum(each.counts)])
            of_entries.append(each.entry_rows[bounds[local.start] : bounds[local.stop]])
            rest = each.entry_choices[bounds[local.start] : bounds[local.stop]]
            places += [(ids[source].flat[choice], source, choice) for choice in rest]
        lengths = [each.firsts[rank + 1] - each.firsts[rank] for each in sent]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        found = lists_of.received(counts, starts, np.concatenate(of_entries), rank, len(ids[rank]))
        assert not found.bad
        # By expert, rank, token; a token that names an expert twice has its choices in their order.
        order = sorted((e, s, c // k, c % k) for e, s, c in places)
        ordered = [(e, s, t) for e, s, t, _ in order]
        whence = [
            (rank, -1 - at) if at < 0 else _token(int(at), starts, sent, rank)
            for at in found.sources.tolist()
        ]
        assert [(s, t) for _, s, t in ordered] == whence
        for at, (e, s, c) in zip(found.places, places, strict=True):
            assert ordered[at] == (e, s, c // k)
        assert sorted(found.places.tolist()) == list(range(len(places)))
        for row in range(starts[ranks]):
            mine = found.row_positions[found.row_firsts[row] : found.row_firsts[row + 1]]
            assert np.flatnonzero(found.sources == row).tolist() == mine.tolist()
        for t in range(len(ids[rank])):
            mine = found.own_positions[found.own_firsts[t] : found.own_firsts[t + 1]]
            assert np.flatnonzero(found.sources == -1 - t).tolist() == mine.tolist()


def _token(
    row: int, starts: np.ndarray[Any, Any], sent: list[lists_of.SentRows], rank: int
) -> tuple[int, int]:
    source = int(np.searchsorted(starts, row, side="right")) - 1
    return source, int(sent[source].tokens[sent[source].firsts[rank] + row - starts[source]])


def test_wrong_numbers_are_found() -> None:
    owners = np.array([0, 0, 1], np.int64)
    for ids, bad in (([[0, 3], [-2, 1]], 1), ([[0, 1], [-2, 1]], 2), ([[2, -1]], -1)):
        assert lists_of.sent(np.array(ids, np.int64), owners, 2, 0, None).bad == bad
    counts, firsts = np.array([[1], [1]], np.int64), np.array([0, 0, 1], np.int64)
    for rows, is_bad in (([1, 0], False), ([2, 0], True), ([0, 1], True), ([0, -1], True)):
        assert lists_of.received(counts, firsts, np.array(rows, np.int32), 0, 2).bad == is_bad


# --- rows -----------------------------------------------------------------------------------------------

ERRORS = {"plain": 0.0, "bf16": 2.0**-8, "fp8_block": 2.0**-4}


def setting(dtype: torch.dtype, width: int, form: Format) -> dict[str, Any]:
    random = torch.Generator().manual_seed(width)
    size = rows_of.nbytes(width, dtype, form)
    gap = size + 4 * (-size % 8 == 0) + (8 if dtype == torch.float64 else 0)  # rows need not touch
    gap += -gap % dtype.itemsize
    return {
        "own": torch.randn(5, width, generator=random).to(dtype),
        "values": torch.randn(7, width, generator=random).to(dtype),
        "weights": torch.rand(7, generator=random),
        "wire": Wire(
            torch.zeros(-(-4 * gap // 16) * 16, dtype=torch.uint8), np.array([2, 0, 3], np.int64) * gap, form
        ),
        "lists": Lists(np.array([0, 2, 2, 5], np.int64), np.array([6, 0, 3, 3, 1], np.int64)),
    }


@pytest.mark.parametrize("form", rows_of.FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("width", [1, 7, 256, 300])
def test_packed_rows_are_unpacked_unchanged(dtype: torch.dtype, width: int, form: Format) -> None:
    given = setting(dtype, width, form)
    own, wire = given["own"], given["wire"]
    rows_of.pack(own, np.array([4, 1, 1]), wire)
    out = torch.empty(6, width, dtype=dtype)
    rows_of.unpack(own, wire, np.array([0, -1, 1, -5, 2, 0]), out)
    expected = own[[4, 0, 1, 4, 1, 4]].double()
    assert torch.equal(out[[1, 3]], own[[0, 4]])  # its own are exact
    error = (out.double() - expected).abs()
    limit = ERRORS[form] * expected.abs() + (
        expected.abs().amax(1, keepdim=True) / 448 if form == "fp8_block" else 0
    )
    assert (error <= limit + 2.0**-8 * expected.abs() * (form != "plain")).all()


@pytest.mark.parametrize("form", rows_of.FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 256, 300])
def test_kernels_are_as_the_reference(dtype: torch.dtype, width: int, form: Format) -> None:
    """Bit for bit, but for the order of additions."""
    given = setting(dtype, width, form)
    own, values, weights, wire, lists = (
        given[each] for each in ("own", "values", "weights", "wire", "lists")
    )
    other = Wire(wire.bytes.clone(), wire.at, form)

    def same() -> None:
        assert torch.equal(wire.bytes, other.bytes)

    rows = np.array([4, 1, 1])
    rows_of.pack(own, rows, wire)
    rows_of.pack_reference(own, rows, other)
    same()
    sources = np.array([0, -1, 1, -5, 2, 0, 0])
    outs = [torch.empty_like(values) for _ in range(2)]
    rows_of.unpack(own, wire, sources, outs[0])
    rows_of.unpack_reference(own, wire, sources, outs[1])
    assert torch.equal(*outs)
    dots = [torch.empty(7) for _ in range(2)]
    rows_of.unpack_gradient(own, wire, sources, weights, values, outs[0], dots[0])
    rows_of.unpack_gradient_reference(own, wire, sources, weights, values, outs[1], dots[1])
    assert torch.equal(*outs)
    torch.testing.assert_close(*dots)
    for factor in (weights, None):
        rows_of.pack_sums(values, factor, lists, wire)
        rows_of.pack_sums_reference(values, factor, lists, other)
        same()
        back, sums = (
            Lists(np.array([0, 1, 1, 3], np.int64), np.array([2, 0, 1], np.int64)),
            [torch.empty(3, width, dtype=dtype) for _ in range(2)],
        )
        rows_of.unpack_sums(values, factor, lists, wire, back, sums[0])
        rows_of.unpack_sums_reference(values, factor, lists, wire, back, sums[1])
        torch.testing.assert_close(*sums, rtol=2e-6 if dtype == torch.float32 else 2.0**-8, atol=1e-6)


def test_special_values_travel() -> None:
    """Test NaN and infinity; an fp8 block with one of them is NaN, as in the codec."""
    own = torch.full((1, 300), 1.0)
    own[0, :3] = torch.tensor([torch.nan, torch.inf, -0.0])
    for form in rows_of.FORMATS:
        wire = Wire(torch.zeros(2048, dtype=torch.uint8), np.zeros(1, np.int64), form)
        out = torch.empty_like(own)
        rows_of.pack(own, np.zeros(1, np.int64), wire)
        rows_of.unpack(own, wire, np.zeros(1, np.int64), out)
        expected = own.clone()
        if form == "fp8_block":
            expected[0, :256] = torch.nan
        torch.testing.assert_close(out, expected, equal_nan=True, rtol=2.0**-4, atol=0)
