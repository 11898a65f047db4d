"""The verifier: its proofs, its refusals with their texts, and mutants, which it must all refuse."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from unit.msccl.msccl_mutants import mutants
from unit.msccl.msccl_oracle import Wrong, check

from mcr_plus.errors import AlgorithmError, ConfigError, InvalidArgument
from mcr_plus.msccl import verifier
from mcr_plus.msccl.algorithm import Algorithm, AlgorithmStep, Chunks, RankProgram, ThreadBlock
from mcr_plus.msccl.generators import GENERATORS
from mcr_plus.msccl.postconditions import wanted
from mcr_plus.msccl.reader import parse_algorithm
from mcr_plus.msccl.simulator import SymbolicRun
from mcr_plus.msccl.verifier import Report, verify, verify_all
from mcr_plus.msccl.well_formed import structure_problems
from mcr_plus.msccl.writer import algorithm_text

# Files in the wild: attributes left out, a comment first, and references of steps that describe the peer's
# buffer only. Offsets of -1 belong to nops.

RING = """\
<!-- a ring of three, in place -->
<algo name="ring" proto="Simple" nchannels="1" nchunksperloop="3" ngpus="3" coll="allreduce" inplace="1">
{gpus}
</algo>
"""
NONE = 'cnt="1" depid="-1" deps="-1" hasdep="0"'


def ring() -> str:
    """Return an all-reduce of three ranks, a message per step."""
    gpus = []
    for rank in range(3):
        types = ["s", "rrs", "rrcs", "rcs", "r"]
        chunks = [(rank - shift) % 3 for shift in (0, 1, 2, 0, 1)]
        lines = [
            f'<step s="{i}" type="{t}" srcbuf="i" srcoff="{k}" dstbuf="i" dstoff="{k}" {NONE}/>'
            for i, (t, k) in enumerate(zip(types, chunks, strict=True))
        ]
        head = f'<gpu id="{rank}" i_chunks="3" o_chunks="0" s_chunks="0">'
        tb = f'<tb id="0" send="{(rank + 1) % 3}" recv="{(rank - 1) % 3}" chan="0">'
        gpus.append("\n".join([head, tb, *lines, "</tb></gpu>"]))
    return RING.format(gpus="\n".join(gpus))


SWAP = """\
<algo name="swap" proto="Simple" nchannels="1" nchunksperloop="1" ngpus="2" coll="allreduce" inplace="1" \
outofplace="0" minBytes="0" maxBytes="0">
  <gpu id="0" i_chunks="1" o_chunks="0" s_chunks="0">
    <tb id="0" send="1" recv="1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" {none}/>
      <step s="1" type="r" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" {none}/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="1" o_chunks="0" s_chunks="0">
    <tb id="0" send="0" recv="0" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" {none}/>
      <step s="1" type="r" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" {none}/>
    </tb>
  </gpu>
</algo>
""".replace("{none}", NONE)


def test_a_ring_is_proved_and_counted() -> None:
    reports = verify_all(parse_algorithm(ring(), "ring.xml"))
    assert reports == [Report(True, 2, blocks=3, steps=15, messages=12, rounds=5, sent=4)]
    check(ring().replace('inplace="1"', 'inplace="1" outofplace="0"'), in_place=True, seeds=10)


def test_a_swap_is_no_sum() -> None:
    assert refusal(parse_algorithm(SWAP, "swap.xml")) == [
        "swap.xml:2: gpu[0]: o[0] (i[0] in place) ends as rank 1's chunk 0; "
        "expected the sum of all ranks' chunks 0",
        "swap.xml:8: gpu[1]: o[0] (i[0] in place) ends as rank 0's chunk 0; "
        "expected the sum of all ranks' chunks 0",
    ]


def refusal(algorithm: Algorithm, *, in_place: bool | None = None, slots: int = 2) -> list[str]:
    """Return the lines of an algorithm's refusal."""
    place = algorithm.in_place if in_place is None else in_place
    with pytest.raises(AlgorithmError) as error:
        verify(algorithm, in_place=place, slots=slots)
    return str(error.value).splitlines()


# --- By hand: two ranks, one thing wrong ------------------------------------------------------------------


def i(at: int) -> Chunks:
    return Chunks("i", at)


def o(at: int) -> Chunks:
    return Chunks("o", at)


def s(at: int) -> Chunks:
    return Chunks("s", at)


def tb(send: int, receive: int, *steps: AlgorithmStep, channel: int = 0) -> ThreadBlock:
    return ThreadBlock(send, receive, channel, steps)


def made(
    collective: str, chunks: int, *ranks: tuple[ThreadBlock, ...], scratch: int = 0, channels: int = 2
) -> Algorithm:
    """Return an algorithm of the given ranks with buffers of the largest permitted size."""
    programs = tuple(RankProgram(chunks, chunks, scratch, blocks) for blocks in ranks)
    return Algorithm("it", collective, len(ranks), chunks, channels, programs)


def send(
    chunks: Chunks, count: int = 1, after: tuple[int, int] | None = None, awaited: bool = False
) -> AlgorithmStep:
    return AlgorithmStep("s", chunks, chunks, count, after, awaited)


def receive(
    chunks: Chunks, count: int = 1, after: tuple[int, int] | None = None, awaited: bool = False
) -> AlgorithmStep:
    return AlgorithmStep("r", chunks, chunks, count, after, awaited)


def add(
    source: Chunks, target: Chunks, after: tuple[int, int] | None = None, awaited: bool = False
) -> AlgorithmStep:
    return AlgorithmStep("re", source, target, 1, after, awaited)


def broadcast(*blocks: ThreadBlock, first: tuple[AlgorithmStep, ...] = ()) -> Algorithm:
    """Return an algorithm: rank 0 sends its chunk once; rank 1 runs the given steps."""
    copy = AlgorithmStep("cpy", i(0), o(0))
    return made("broadcast", 1, (tb(1, -1, *(first or (send(i(0)),)), copy),), blocks, scratch=2)


def test_messages_without_a_receiver_or_sender() -> None:
    assert refusal(broadcast()) == [
        "<it>: gpu[0].tb[0].step[0]: a message from rank 0 to rank 1 on channel 0 that nobody receives: "
        "1 sent, 0 received"
    ]
    assert refusal(broadcast(tb(-1, 0, receive(o(0)), receive(o(0))))) == [
        "<it>: gpu[1].tb[0].step[1]: waits for a message from rank 0 to rank 1 on channel 0 that nobody "
        "sends: 1 sent, 2 received"
    ]


def test_messages_of_another_length() -> None:
    algorithm = broadcast(tb(-1, 0, receive(s(0), 2)))
    assert refusal(algorithm) == [
        "<it>: gpu[1].tb[0].step[0].cnt: 2, but gpu[0].tb[0].step[0] sends 1; expected the same"
    ]


def test_a_read_of_an_unwritten_chunk() -> None:
    algorithm = broadcast(tb(-1, 0, receive(s(0)), AlgorithmStep("cpy", s(1), o(0))))
    assert refusal(algorithm) == ["<it>: gpu[1].tb[0].step[1]: reads s[1], which has never been written"]
    # any contents: only the root sends
    algorithm = broadcast(tb(-1, 0, receive(s(0)), AlgorithmStep("cpy", i(0), o(0))))
    assert "reads i[0], which has never been written" in refusal(algorithm, in_place=True)[0]


def test_an_output_that_is_never_written() -> None:
    algorithm = broadcast(tb(-1, 0, receive(s(0))))
    assert refusal(algorithm) == [
        "<it>: gpu[1]: o[0] (i[0] in place) is never written; expected rank 0's chunk 0"
    ]


def test_a_repeated_or_missing_contribution_is_refused() -> None:
    def exchange(*extra: AlgorithmStep) -> tuple[ThreadBlock, ...]:
        return (tb(1, 1, send(i(0)), AlgorithmStep("rrc", i(0), o(0)), *extra),)

    other = (tb(0, 0, send(i(0)), AlgorithmStep("rrc", i(0), o(0))),)
    assert verify_all(made("allreduce", 1, exchange(), other))
    assert refusal(made("allreduce", 1, exchange(add(o(0), o(0))), other)) == [
        "<it>: gpu[0]: o[0] (i[0] in place) ends as a sum with rank 0's chunk 0, rank 1's chunk 0 "
        "more than once; expected the sum of all ranks' chunks 0"
    ]
    idle = (tb(0, 0, send(i(0)), receive(s(0))),)
    assert refusal(made("allreduce", 1, exchange(), idle, scratch=1)) == [
        "<it>: gpu[1]: o[0] (i[0] in place) ends as rank 1's chunk 0; expected the sum of all ranks' chunks 0"
    ]


def test_a_sum_of_the_wrong_chunks() -> None:
    def rank(peer: int, source: int) -> tuple[ThreadBlock, ...]:
        return (tb(peer, peer, send(i(1)), AlgorithmStep("rrc", i(source), o(0))),)

    algorithm = made(
        "reducescatter", 2, rank(1, 0), (tb(0, 0, send(i(0)), AlgorithmStep("rrc", i(0), o(0))),)
    )
    assert refusal(algorithm) == [
        "<it>: gpu[1]: o[0] (i[1] in place) ends as a sum without rank 1's chunk 1 and with rank 1's "
        "chunk 0; expected the sum of all ranks' chunks 1"
    ]


def test_a_write_to_the_input_out_of_place() -> None:
    algorithm = parse_algorithm(ring().replace('o_chunks="0"', 'o_chunks="3"'), "ring.xml")
    lines = refusal(algorithm, in_place=False)
    assert lines[0] == (
        "ring.xml:7: gpu[0].tb[0].step[2]: writes i[1]; out of place, expected the input to be left as it is"
    )


def test_a_buffer_that_such_a_call_does_not_have() -> None:
    lines = refusal(
        made("reduce", 1, (tb(-1, -1),), (tb(-1, -1, AlgorithmStep("cpy", i(0), o(0))),)), in_place=False
    )
    assert lines == [
        "<it>: gpu[1].tb[0].step[0]: uses o[0], but out of place the length of rank 1's buffer 'o' is 0"
    ]


def test_source_and_target_that_overlap() -> None:
    moved = AlgorithmStep("cpy", o(0), o(1), 2)
    blocks = (tb(1, 1, send(i(0), 3), receive(o(3), 3), AlgorithmStep("cpy", i(0), o(0), 3), moved),)
    lines = refusal(
        made("allgather", 6, blocks, (tb(0, 0, send(i(0), 3), receive(o(0), 3)),)), in_place=False
    )
    assert lines == [
        "<it>: gpu[0].tb[0].step[3]: source and target overlap, expected the same chunks or others"
    ]


# --- Races ------------------------------------------------------------------------------------------------


def test_a_race_names_both_steps() -> None:
    # tb 1 copies from scratch what tb 0 receives; with and without a dependency
    def rank(peer: int, after: tuple[int, int] | None) -> tuple[ThreadBlock, ...]:
        mine = 1 - peer
        return (
            tb(peer, peer, send(i(0)), receive(s(0), awaited=after is not None)),
            tb(-1, -1, AlgorithmStep("cpy", s(0), o(peer), 1, after), AlgorithmStep("cpy", i(0), o(mine))),
        )

    assert verify_all(made("allgather", 2, rank(1, (0, 1)), rank(0, (0, 1)), scratch=1))
    lines = refusal(made("allgather", 2, rank(1, None), rank(0, (0, 1)), scratch=1))
    # the copy comes first in a run of all steps at once, before any write
    assert lines[0] == "<it>: gpu[0].tb[1].step[0]: reads s[0], which has never been written"
    assert lines[1] == (
        "<it>: gpu[0].tb[0].step[1]: writes s[0], which gpu[0].tb[1].step[0] reads: "
        "a race, expected one to wait for the other"
    )


def test_writes_of_two_thread_blocks_race_even_if_either_order_is_right() -> None:
    twice = broadcast(tb(-1, 0, receive(o(0))), tb(-1, 0, receive(o(0)), channel=1), first=(send(i(0)),))
    programs = list(twice.programs)
    second = tb(1, -1, send(i(0)), channel=1)
    programs[0] = replace(programs[0], blocks=(*programs[0].blocks, second))
    lines = refusal(replace(twice, programs=tuple(programs)), in_place=False)
    assert lines == [
        "<it>: gpu[1].tb[1].step[0]: writes o[0], which gpu[1].tb[0].step[0] writes: "
        "a race, expected one to wait for the other"
    ]


def test_a_message_to_another_rank_and_back_is_order() -> None:
    # In place, rank 0 overwrites the sent chunk, in another thread block, with the answer.
    first = (tb(1, -1, send(i(0))), tb(-1, 1, receive(o(0))))
    second = (tb(0, 0, AlgorithmStep("rrcs", i(0), o(0))),)
    assert verify_all(made("allreduce", 1, first, second))


def test_a_full_queue_does_not_order_steps() -> None:
    # With one slot, the second send waits until the first message has left, and the message on channel 1
    # waits for that send: so its receipt comes last. With more slots it may come earlier, and no proof may
    # rely on the order.
    sender = (
        tb(1, -1, send(i(0)), send(i(0), awaited=True), AlgorithmStep("cpy", i(0), o(0))),
        tb(1, -1, send(i(0), after=(0, 1)), channel=1),
    )
    taker = (tb(-1, 0, receive(s(0)), receive(o(0))), tb(-1, 0, receive(s(0)), channel=1))
    assert refusal(made("broadcast", 1, sender, taker, scratch=1), slots=1) == [
        "<it>: gpu[1].tb[1].step[0]: writes s[0], which gpu[1].tb[0].step[0] writes: "
        "a race, expected one to wait for the other"
    ]


def test_a_copy_onto_itself_does_not_race() -> None:
    # the copy to the own part, which in place changes nothing
    def rank(peer: int) -> tuple[ThreadBlock, ...]:
        mine = 1 - peer
        return tb(peer, peer, send(i(0)), receive(o(peer))), tb(-1, -1, AlgorithmStep("cpy", i(0), o(mine)))

    assert len(verify_all(made("allgather", 2, rank(1), rank(0)))) == 2


def test_a_proof_out_of_place_does_not_cover_in_place() -> None:
    # sending the input and receiving into the output, in thread blocks of their own
    def rank(peer: int, after: tuple[int, int] | None) -> tuple[ThreadBlock, ...]:
        copy = tb(-1, -1, AlgorithmStep("cpy", i(1 - peer), o(1 - peer)))
        return tb(peer, -1, send(i(peer), awaited=True)), tb(-1, peer, receive(o(peer), 1, after)), copy

    assert verify_all(made("alltoall", 2, rank(1, (0, 0)), rank(0, (0, 0))))
    racy = made("alltoall", 2, rank(1, None), rank(0, None))
    assert verify(racy, in_place=False)
    assert "writes o[1], which gpu[0].tb[0].step[0] reads: a race" in refusal(racy, in_place=True)[0]


# --- Deadlock ---------------------------------------------------------------------------------------------


def test_a_ring_needs_two_slots() -> None:
    algorithm = parse_algorithm(ring(), "ring.xml")
    for slots in (2, 3, 8):
        assert verify(algorithm, in_place=True, slots=slots).slots == slots
    assert refusal(algorithm, slots=1) == [
        "ring.xml:6: gpu[0].tb[0].step[1]: deadlock with queues of 1: it waits for a free slot from "
        "gpu[1].tb[0].step[1] (line 14), which waits for a free slot from gpu[2].tb[0].step[1] (line 22), "
        "which waits for a free slot from gpu[0].tb[0].step[1] (line 6)"
    ]


def test_receiving_first_on_both_ranks() -> None:
    def rank(peer: int) -> tuple[ThreadBlock, ...]:
        return (tb(peer, peer, AlgorithmStep("rrc", i(0), o(0)), send(i(0))),)

    assert refusal(made("allreduce", 1, rank(1), rank(0))) == [
        "<it>: gpu[0].tb[0].step[0]: deadlock with queues of 2: it waits for a message from "
        "gpu[1].tb[0].step[0], which waits for a message from gpu[0].tb[0].step[0]"
    ]


def test_a_dependency_that_closes_a_cycle() -> None:
    early = AlgorithmStep("nop", i(0), i(0), 0, (1, 0), True)
    late = AlgorithmStep("nop", i(0), i(0), 0, (0, 0), True)
    algorithm = broadcast(tb(-1, 0, early, receive(o(0))), tb(-1, -1, late))
    assert refusal(algorithm) == [
        "<it>: gpu[1].tb[0].step[0]: deadlock with queues of 2: it waits for the step it depends on from "
        "gpu[1].tb[1].step[0], which waits for the step it depends on from gpu[1].tb[0].step[0]"
    ]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_as_many_messages_as_slots_may_be_ahead(slots: int) -> None:
    def rank(peer: int, count: int) -> tuple[ThreadBlock, ...]:
        ahead = [send(i(0))] * count
        behind = [receive(s(0))] * (count - 1)
        return (tb(peer, peer, *ahead, *behind, AlgorithmStep("rrc", i(0), o(0))),)

    assert verify(
        made("allreduce", 1, rank(1, slots), rank(0, slots), scratch=1), in_place=False, slots=slots
    )
    lines = refusal(made("allreduce", 1, rank(1, slots + 1), rank(0, slots + 1), scratch=1), slots=slots)
    assert f"deadlock with queues of {slots}" in lines[0]


# --- Limits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["alltoallv", "custom", "send", "recv"])
def test_collectives_without_a_defined_result_are_refused(kind: str) -> None:
    lines = refusal(made(kind, 1, (), ()))
    assert len(lines) == 1
    assert lines[0].startswith(f"<it>: algo.coll: not verified: what {kind!r} must compute does not follow")


def test_at_most_twenty_problems_are_reported() -> None:
    lines = refusal(made("allgather", 60, (), ()))
    assert len(lines) == 21
    assert lines[-1] == "<it>: and 40 more"  # each rank has 30 of its 60 chunks


def test_structure_is_checked_without_a_file_too() -> None:
    lines = refusal(made("allreduce", 1, (tb(1, -1, send(i(1))),), (tb(5, -1),)))
    assert lines == [
        "<it>: gpu[0].tb[0].step[0].srcoff: 1, expected 0 to 0: the length of buffer 'i' is 1",
        "<it>: gpu[1].tb[0].send: 5, expected a rank: 0 to 1, or -1 for none",
    ]


def test_algorithms_that_need_gigabytes_are_refused() -> None:
    wide = made("allreduce", 4096, *[()] * 16)
    assert refusal(wide) == [
        "<it>: algo.nchunksperloop: 4096, expected at most 2048 for 16 ranks: the verifier follows 32768 "
        "contributions, chunks times ranks"
    ]
    many = made("allreduce", 1, (tb(-1, -1),) * 12000, ())
    assert refusal(many) == [
        "<it>: algo: 12000 thread blocks and 0 steps that others wait for, expected fewer of both: the "
        "verifier keeps 134217728 clocks, thread blocks times the sum of the two"
    ]


def idle(*blocks: tuple[int, AlgorithmStep], scratch: int = 0) -> Algorithm:
    """Return two ranks; one has thread blocks without peers, each with this many steps."""
    first = tuple(tb(-1, -1, *[step] * times) for times, step in blocks)
    return made("allreduce", 4096, first, (), scratch=scratch)


@pytest.mark.parametrize(
    ("algorithm", "what"),  # made by the test: each takes some tenths of a second
    [
        (
            lambda: idle((500, AlgorithmStep("cpy", i(0), s(0), 4096)), scratch=4096),
            "500 steps that move 2048000 chunks, expected fewer or smaller ones: the verifier follows "
            "524288, steps and chunks taken together",
        ),
        (
            lambda: idle(*[(1000, AlgorithmStep("nop", i(0), i(0), 0))] * 525),
            "525000 steps that move 0 chunks, expected fewer or smaller ones: the verifier follows 524288, "
            "steps and chunks taken together",
        ),
        (
            lambda: idle(*[(0, send(i(0)))] * 11000, (50_000, AlgorithmStep("nop", i(0), i(0), 0))),
            "11001 thread blocks and 50000 steps, expected fewer of both: the verifier compares 536870912 "
            "clocks, the one times the other",
        ),
        (
            lambda: made("allreduce", 1, *[()] * 33, scratch=4096),
            "135168 chunks of scratch on all ranks, expected at most 131072",
        ),
    ],
    ids=["chunks", "steps", "clocks", "scratch"],
)
def test_algorithms_beyond_the_limits_are_refused(algorithm: Callable[[], Algorithm], what: str) -> None:
    assert refusal(algorithm()) == [f"<it>: algo: {what}"]


@pytest.mark.short("all_reduce_halving_doubling-255")
@pytest.mark.parametrize(
    ("name", "ranks"), [("all_reduce_halving_doubling", 255), ("all_to_all_two_level", 110)]
)
def test_the_largest_generated_algorithms_are_within_the_limits(name: str, ranks: int) -> None:
    """The algorithms of `docs/msccl.md` with the most moved chunks, and with the most compared clocks."""
    assert list(structure_problems(GENERATORS[name].make(ranks))) == []


def test_waiting_thread_blocks_are_checked_only_after_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0
    waits = SymbolicRun._waits

    def counted(run: SymbolicRun, index: int) -> list[tuple[str, int]]:
        nonlocal looks
        looks += 1
        return waits(run, index)

    monkeypatch.setattr(SymbolicRun, "_waits", counted)
    steps = [AlgorithmStep("nop", i(0), i(0), 0, None, True)] * 200
    last = AlgorithmStep("nop", i(0), i(0), 0, (0, 199))
    run = SymbolicRun(
        made("allreduce", 1, (tb(-1, -1, *steps), *[tb(-1, -1, last)] * 100), ()), in_place=True, slots=2
    )
    assert run.rounds == 201
    assert looks <= 2 * 300


def test_the_sum_of_all_ranks_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(algorithm: Algorithm, rank: int, *, in_place: bool) -> dict[int, int]:
        asked.append(rank)
        return wanted(algorithm, rank, in_place=in_place)

    monkeypatch.setattr(verifier, "wanted", counted)
    verify(GENERATORS["all_reduce_ring"].make(5), in_place=True)
    assert asked == [0]
    verify(GENERATORS["all_gather_ring"].make(5), in_place=True)
    assert asked == [0, 0, 1, 2, 3, 4]


def test_too_many_channels_are_refused() -> None:
    assert verify_all(replace(GENERATORS["all_reduce_ring"].make(2), channels=256))
    for channels in (0, 257, 999_999_999_999_999_999):
        assert refusal(made("allreduce", 1, (), (), channels=channels)) == [
            f"<it>: algo.nchannels: {channels}, expected 1 to 256"
        ]


def test_the_count_of_a_nop_is_ignored() -> None:
    ring_of_two = GENERATORS["all_reduce_ring"].make(2)
    block = ring_of_two.programs[0].blocks[0]
    idle_step = AlgorithmStep("nop", i(0), i(0), 999_999_999_999_999_999)
    first = replace(ring_of_two.programs[0], blocks=(replace(block, steps=(*block.steps, idle_step)),))
    algorithm = replace(ring_of_two, programs=(first, ring_of_two.programs[1]))
    assert verify_all(algorithm)
    assert algorithm.largest_step == ring_of_two.largest_step == 1


def test_an_algorithm_for_no_call_is_refused() -> None:
    with pytest.raises(AlgorithmError, match=r"algo.inplace: 0, expected 1 here or in outofplace"):
        verify_all(replace(made("allreduce", 1, (), ()), in_place=False, out_of_place=False))


def test_queues_without_slots_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"^slots: 0, expected at least 1$"):
        verify(made("allreduce", 1, (), ()), in_place=True, slots=0)


def test_a_reduce_in_place_preserves_other_inputs() -> None:
    root = (tb(-1, 1, AlgorithmStep("rrc", i(0), o(0))),)
    assert verify_all(made("reduce", 1, root, (tb(0, -1, send(i(0))),), scratch=1))
    spoilt = (tb(0, -1, send(i(0)), AlgorithmStep("re", i(0), i(0))),)
    lines = refusal(made("reduce", 1, root, spoilt, scratch=1))
    assert lines == [
        "<it>: gpu[1]: o[0] (i[0] in place) ends as a sum with rank 1's chunk 0 more than once; "
        "expected rank 1's chunk 0"
    ]


# --- Mutants ----------------------------------------------------------------------------------------------

SPOILT = {
    "all_reduce_ring": 3, "all_reduce_halving_doubling": 3, "all_reduce_all_pairs": 3,
    "all_reduce_hierarchical": 4, "all_to_all_direct": 3, "all_to_all_two_level": 4, "all_gather_ring": 3,
    "all_gather_direct": 3, "reduce_scatter_ring": 3, "reduce_scatter_direct": 3, "broadcast_tree": 4,
    "reduce_tree": 4, "gather_direct": 3, "scatter_direct": 3,
}  # fmt: skip
ORDERS = 10


@functools.cache
def fates(name: str) -> Counter[tuple[str, str]]:
    """Numbers of refused mutants of a kind by check, and of harmless ones, in place and out of place."""
    found: Counter[tuple[str, str]] = Counter()
    for mutant in mutants(GENERATORS[name].make(SPOILT[name])):
        text = algorithm_text(mutant.algorithm)
        try:
            algorithm = parse_algorithm(text, "mutant.xml")
        except ConfigError:
            found[mutant.kind, "reader"] += 2
            continue
        for in_place in (True, False):
            try:
                verify(algorithm, in_place=in_place)
            except AlgorithmError:
                found[mutant.kind, "verifier"] += 1
                continue
            try:
                check(text, in_place=in_place, seeds=ORDERS)
            except Wrong as error:
                place = "in place" if in_place else "out of place"
                pytest.fail(f"{name}: {mutant.kind} at {mutant.where}, {place}, is proved, but {error}")
            found[mutant.kind, "harmless"] += 1
    return found


@pytest.mark.short("all_gather_direct", "all_reduce_ring", "all_to_all_direct")
@pytest.mark.parametrize("name", SPOILT)
def test_mutants_are_refused_or_harmless(name: str) -> None:
    assert fates(name).total() > 100


@pytest.mark.long
def test_counts_of_refused_and_harmless_mutants() -> None:
    """Dependencies that other waits imply are harmless, and so are overwritten or aliased chunks."""
    total = sum((fates(name) for name in SPOILT), Counter())
    kinds = sorted({kind for kind, _ in total})
    table = {kind: tuple(total[kind, fate] for fate in ("reader", "verifier", "harmless")) for kind in kinds}
    assert table == {
        "count": (542, 260, 2),
        "dependency": (0, 120, 88),
        "drop": (0, 406, 28),
        "duplicate": (0, 354, 80),
        "offset": (504, 524, 0),
        "operation": (0, 276, 6),
        "order": (0, 144, 28),
        "peer": (688, 156, 0),
        "space": (476, 379, 173),
    }
