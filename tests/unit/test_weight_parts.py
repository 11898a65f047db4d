"""Which source rank sends what to whom, against NumPy's slices of whole tensors."""

from __future__ import annotations

from typing import Any

import layout_oracle as oracle
import numpy as np
import pytest
import torch

from mcr_plus.errors import InvalidArgument
from mcr_plus.layout.layout import Layout
from mcr_plus.weight_sync.shards import ShardAssignment, parts_of
from mcr_plus.weight_sync.weights import Weights

SOURCES, RECEIVERS = [0, 1, 2], [3, 4, 5, 6]
Pair = tuple[oracle.Side, oracle.Side]


def pairs() -> dict[str, tuple[torch.dtype, Pair]]:
    """Layouts of the sources and of the receivers by the definition, and a dtype."""
    rows, grid = (7, 5), [[3, 4], [5, 6]]
    return {
        "uneven": (
            torch.bfloat16,
            (oracle.sharded(rows, SOURCES, 0, [4, 0, 3]), oracle.sharded(rows, RECEIVERS, 1, [2, 0, 2, 1])),
        ),
        "engines": (
            torch.bfloat16, (oracle.mesh((9, 6), SOURCES, ["S0"]), oracle.mesh((9, 6), grid, ["R", "S1"])),
        ),
        "replicas": (
            torch.float32, (oracle.mesh((5, 4), SOURCES, ["R"]), oracle.mesh((5, 4), RECEIVERS, ["R"])),
        ),
        "flat": (
            torch.int16,
            (
                oracle.flat((5, 9), SOURCES, [[(0, 13)], [], [(30, 45), (13, 30)]]),
                oracle.flat((5, 9), RECEIVERS, [[(7, 45)], [(0, 7)], [], [(3, 20), (40, 41)]]),
            ),
        ),
        "complex": (
            torch.complex64,
            (
                oracle.flat((4, 3), SOURCES, [[(0, 5)], [(5, 11)], [(11, 12)]]),
                oracle.mesh((4, 3), grid, ["S0", "S1"]),
            ),
        ),
        "overlapping": (
            torch.float64,
            (
                oracle.boxes(rows, {0: [[(0, 5), (0, 5)]], 1: [[(2, 7), (0, 3)]], 2: [[(4, 7), (1, 5)]]}),
                oracle.boxes(
                    rows, {3: [[(0, 4), (0, 3)], [(2, 5), (0, 5)]], 4: [[(1, 7), (1, 5)]], 5: [], 6: []}
                ),
            ),
        ),
        "stage": (
            torch.uint8, (oracle.mesh((8, 3), [1], ["R"]), oracle.sharded((8, 3), [6, 4], 0, [5, 3])),
        ),
        "scalar": (torch.float32, (oracle.mesh((), SOURCES, ["R"]), oracle.mesh((), RECEIVERS, ["R"]))),
        "empty": (
            torch.float32, (oracle.mesh((0, 3), SOURCES, ["S0"]), oracle.mesh((0, 3), RECEIVERS, ["R"])),
        ),
    }  # fmt: skip


def part(whole: torch.Tensor, side: oracle.Side, rank: int) -> torch.Tensor | None:
    """A rank's local tensor, of the elements that the definition gives it."""
    if rank not in side.tensors:
        return None
    return whole.reshape(-1)[torch.from_numpy(side.tensors[rank])]


def laid(chosen: dict[str, tuple[torch.dtype, Pair]], wholes: dict[str, torch.Tensor]) -> Any:
    """The weights of all ranks, with buffers for their parts; those of receivers hold zeros."""
    weights, states = {}, {}
    for rank in (*SOURCES, *RECEIVERS):
        state, layouts = {}, {}
        for name, (_, sides) in chosen.items():
            side = sides[rank in RECEIVERS]
            layouts[name] = side.layout
            local = part(wholes[name], side, rank)
            if local is not None:
                state[name] = torch.zeros_like(local) if rank in RECEIVERS else local
        states[rank] = state
        weights[rank] = Weights(state, layouts, rank)
    parts = parts_of({rank: each.held for rank, each in weights.items()}, SOURCES)
    for rank, each in weights.items():
        each.lay([one for one in parts if rank == one.source or rank in one.receivers])
    return weights, states, parts


def test_receivers_get_their_elements_and_each_is_sent_by_one_rank() -> None:
    chosen = pairs()
    draw = torch.Generator().manual_seed(0)
    wholes = {
        name: (torch.rand(sides[0].shape, generator=draw) * 200).to(dtype)
        for name, (dtype, sides) in chosen.items()
    }
    weights, states, parts = laid(chosen, wholes)
    buffers = {rank: each.buffers() for rank, each in weights.items()}
    for rank in SOURCES:
        weights[rank].read(buffers[rank])
    places = dict.fromkeys(weights, 0)
    for each in parts:  # what `WeightSource` and `WeightReceiver` do, without the wire
        sent = buffers[each.source][places[each.source]]
        places[each.source] += 1
        for rank in each.receivers:
            buffers[rank][places[rank]].copy_(sent)
            places[rank] += 1
    for rank in RECEIVERS:
        weights[rank].write(buffers[rank])
        for name, found in states[rank].items():
            expected = part(wholes[name], chosen[name][1][1], rank)
            assert expected is not None
            assert torch.equal(found, expected), (name, rank)
    _check_volumes(chosen, parts, weights)


def _check_volumes(
    chosen: dict[str, tuple[torch.dtype, Pair]], parts: list[ShardAssignment], weights: Any
) -> None:
    """No element is encoded twice, or sent to a rank that does not hold it."""
    needed = {
        name: np.unique(np.concatenate([*sides[1].held.values()])) for name, (_, sides) in chosen.items()
    }
    twice = {name: 1 + dtype.is_complex for name, (dtype, _) in chosen.items()}
    encoded = sum(int(boxes.volumes.sum()) for each in parts for _, boxes in each.boxes)
    assert encoded == sum(len(elements) * twice[name] for name, elements in needed.items())
    for rank in RECEIVERS:
        own = sum(
            len(sides[1].held[rank]) * twice[name]
            for name, (_, sides) in chosen.items()
            if rank in sides[1].held
        )
        assert weights[rank].numel == own
    sent = [weights[rank].nbytes for rank in SOURCES]
    assert min(sent) > max(sent) / 5, "replicas are sent by the rank that has the least to send"


def test_whole_tensors_of_one_source_are_one_buffer_for_each_dtype() -> None:
    state = {"a": torch.zeros(3), "b": torch.zeros(2, 2, dtype=torch.int8), "c": torch.zeros(5)}
    here = Weights(state)
    parts = parts_of({4: here.held, 0: here.held, 2: here.held}, [4])
    here.lay(parts)
    assert [(each.source, each.receivers, each.dtype) for each in parts] == [
        (4, (0, 2), "float32"), (4, (0, 2), "int8"),
    ]  # fmt: skip
    assert here.sizes == [8, 4]
    assert here.is_whole


def test_strided_local_tensors_are_read_and_written_in_place() -> None:
    """As the parts of a fused projection are: views of another tensor."""
    fused = torch.zeros(6, 8)
    layout = Layout.sharded((6, 8), [0, 1], 1)
    here, there = Layout.sharded((6, 8), [0], 0), torch.arange(48.0).reshape(6, 8)
    source = Weights({"w": there}, {"w": here}, 0)
    receiver = Weights({"w": fused[:, 1::2]}, {"w": layout}, 1)
    parts = parts_of({0: source.held, 1: receiver.held}, [0])
    source.lay(parts)
    receiver.lay(parts)
    buffers = source.buffers()
    source.read(buffers)
    receiver.write(buffers)
    assert torch.equal(fused[:, 1::2], there[:, 4:])
    assert not fused[:, ::2].any()


@pytest.mark.parametrize(
    ("source", "receiver", "text"),
    [
        (Layout.sharded((6, 4), [0, 1], 0), Layout.sharded((6, 4), [3, 4], 1), "holds all elements in"),
        (Layout.sharded((6, 4), [0], 0), Layout.sharded((4, 6), [3], 0), "rank 3 has 'w' of shape"),
    ],
)
def test_shards_that_do_not_fit_are_refused_by_name(source: Layout, receiver: Layout, text: str) -> None:
    here = Weights({"w": torch.zeros(source.locals[0])}, {"w": source}, 0)
    there = Weights({"w": torch.zeros(receiver.locals[3])}, {"w": receiver}, 3)
    with pytest.raises(InvalidArgument, match=text):
        parts_of({0: here.held, 3: there.held}, [0])


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_layout_of_a_tensor_that_is_not_there_is_refused(shape: tuple[int, ...]) -> None:
    layout = oracle.mesh(shape, [0], ["R"]).layout
    with pytest.raises(InvalidArgument, match="gives rank 0 a part, but there is no tensor 's'"):
        Weights({"w": torch.zeros(2)}, {"s": layout}, 0)


def test_tensors_that_one_side_lacks_are_refused() -> None:
    one, two = Weights({"w": torch.zeros(3)}), Weights({"w": torch.zeros(3), "v": torch.zeros(2)})
    with pytest.raises(InvalidArgument, match=r"'v' of shape \[2\], float32 is a tensor of src=\[0\], and"):
        parts_of({0: two.held, 1: one.held}, [0])
    with pytest.raises(InvalidArgument, match=r"'v' of shape \[2\], float32: no rank of src=\[0\]"):
        parts_of({0: one.held, 1: two.held}, [0])
