"""Codecs by link: the choice against all choices, node rates against closed forms, and what is refused."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
from plan_blocks import chain, cluster, layer

from mcr_plus.bucketing.topology import Topology
from mcr_plus.errors import ConfigError, InvalidArgument
from mcr_plus.plans.codecs import TransferCodec, transfer_codec
from mcr_plus.plans.foretell import OVERHEAD, cluster_costs, foretell
from mcr_plus.plans.named import hybrid
from mcr_plus.plans.proof import prove
from mcr_plus.plans.search import SLACK, choose_codecs, search

ALLOWED: list[Any] = ["int8_block", {"codec": "topk", "ratio": 0.01}, "bf16"]
MILDEST: list[Any] = [None, "bf16", "int8_block", {"codec": "topk", "ratio": 0.01}]
RATES = ("1Mbit/s", "10Mbit/s", "100Mbit/s", "10Gbit/s")


@pytest.fixture(autouse=True)
def no_time_to_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let codecs take the time of their bytes alone, so that times do not depend on the run."""

    def timeless(choice: Any, dtype: str, sums: Any = None) -> TransferCodec:
        return transfer_codec(choice, dtype, sums)._replace(encode=0.0, decode=0.0)

    for module in ("search", "search_costs", "foretell", "codecs"):
        monkeypatch.setattr(f"mcr_plus.plans.{module}.transfer_codec", timeless)


def unlike(rates: list[str], **options: Any) -> Any:
    nic = {"rate": "10Gbit/s", "rates": rates, "latency": "10us"}
    return cluster_costs(Topology.of({"nodes": len(rates), "links": {"nic": nic}, **options}))


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_as_fast_as_any_and_no_link_needs_less(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.randint(2, 4)
    sizes = [draw.randint(1 << 14, 1 << 20) for _ in range(stages)]
    blocks = [layer(number, output=size, forward=draw.random() / 50) for number, size in enumerate(sizes)]
    costs = unlike([draw.choice(RATES) for _ in range(stages)])
    proved = prove(hybrid(chain(blocks), stages, stages=stages, micro_batches=draw.randint(1, 4)))
    moved = range(1, stages)

    def step(choices: tuple[Any, ...]) -> float:
        proved.plan.codecs = {t: codec for t, codec in zip(moved, choices, strict=True) if codec is not None}
        return foretell(proved, costs).step_s

    steps = {
        numbers: step(tuple(MILDEST[n] for n in numbers)) for numbers in product(range(4), repeat=stages - 1)
    }
    choose_codecs(proved, costs, ALLOWED)
    found = tuple(MILDEST.index(proved.plan.codecs.get(tensor)) for tensor in moved)
    most = (1 + SLACK) * min(steps.values())
    assert steps[found] <= most * (1 + 1e-9)
    for at, number in enumerate(found):
        for milder in range(number):
            other = (*found[:at], milder, *found[at + 1 :])
            assert steps[other] > most


def test_an_idle_link_is_left_alone() -> None:
    """One slow link between three stages: only what goes over it is compressed."""
    proved = prove(hybrid(chain([layer(number) for number in range(3)]), 3, stages=3, micro_batches=4))
    choose_codecs(proved, unlike(["10Gbit/s", "10Gbit/s", "10Mbit/s"]), ALLOWED)
    assert proved.plan.codecs == {2: MILDEST[-1]}
    choose_codecs(proved, unlike(["10Gbit/s"] * 3), ALLOWED)
    assert proved.plan.codecs == {}


@pytest.mark.parametrize("rate", [10, 100, 300, 1000, 10_000])
def test_sums_of_gradients_have_the_mildest_codec_that_is_as_fast_as_any(rate: int) -> None:
    profile = chain([layer(0, params=1 << 22), layer(1, output=4, shape=(), params=0)])
    proved, costs = prove(hybrid(profile, 2, data=2)), unlike([f"{rate}Mbit/s"] * 2)
    steps = []
    for codec in MILDEST:
        proved.plan.codecs = {} if codec is None else {0: codec}
        steps.append(foretell(proved, costs).step_s)
    choose_codecs(proved, costs, ALLOWED)
    mildest = next(codec for codec, step in zip(MILDEST, steps, strict=True) if step <= 1.05 * min(steps))
    assert proved.plan.codecs == ({} if mildest is None else {0: mildest})
    saved = (1 << 22) - transfer_codec("int8_block", "float32").wire(1 << 22)
    assert steps[0] - steps[2] == pytest.approx(saved * 8 / (1e6 * rate), rel=0.02)


def test_codecs_of_sums_alone_are_foretold() -> None:
    proved = prove(hybrid(chain([layer(0, params=1 << 22)]), 2, data=2))
    slow = unlike(["10Mbit/s"] * 2)
    plain = foretell(proved, slow).step_s
    proved.plan.compress("sums", {"codec": "topk", "ratio": 0.01, "ef21": True})
    assert foretell(proved, slow).step_s < plain / 10
    with pytest.raises(InvalidArgument, match="ef21 is for"):
        proved.plan.compress(0, proved.plan.codecs[0])


@pytest.mark.long
def test_a_search_counts_compressed_sums() -> None:
    """Data parallelism over a slow link is the best only with a codec."""
    profile = chain([layer(number, output=1 << 20, params=1 << 22) for number in range(2)])
    costs = unlike(["300Mbit/s"] * 2)
    plain, coded = (
        search(profile, 2, costs, micro_batches=[4], codecs=codecs).plans[0] for codecs in ([], ALLOWED[1:2])
    )
    assert plain.choice.data == 1
    assert coded.choice.data == 2
    assert coded.plan.plan.codecs == {0: ALLOWED[1]}
    assert coded.seconds == pytest.approx(coded.step, rel=0.1)


def test_a_message_takes_the_time_of_the_slower_of_two_links() -> None:
    costs = unlike(["100Mbit/s", "10Mbit/s", "1Gbit/s"])
    nbytes = 10_000_000
    for group, rate in (((0, 1), 10e6), ((1, 2), 10e6), ((0, 2), 100e6), ((0, 1, 2), 10e6)):
        seconds = costs.of("broadcast", nbytes, group, "assumed").seconds
        assert seconds >= nbytes * 8 / rate
        even = cluster_costs(cluster(3, 1, nic=f"{rate / 1e6:.0f}Mbit/s"))
        assert seconds == pytest.approx(even.of("broadcast", nbytes, group, "assumed").seconds)


def test_nodes_have_the_same_rates_however_they_are_written() -> None:
    rates = ["40Mbit/s", "10Mbit/s", "10Mbit/s"]
    one, other = (
        Topology.of({"nodes": 3, "links": {"nic": {"rate": rate, "rates": own, "latency": "1us"}}})
        for rate, own in (("40Mbit/s", rates), ("10Mbit/s", rates[:1]))
    )
    for group in ([0, 1], [0, 1, 2]):
        assert one.placement(group).slowest == other.placement(group).slowest == 10e6 / 8


def test_a_changed_rate_is_that_of_all_nodes() -> None:
    nic = {"rate": "40Mbit/s", "rates": ["10Mbit/s"], "latency": "1us"}
    changed = Topology.of({"nodes": 2, "links": {"nic": nic}}).changed(["nic=1Gbit/s"])
    assert changed.placement([0, 1]).slowest is None
    assert changed.rate("nic") == 1e9 / 8


@pytest.mark.parametrize(("nodes", "found"), [(1, {}), (2, {2: "bf16"}), (4, {})])
def test_replicas_get_codecs_only_where_these_keep_them_equal(nodes: int, found: dict[int, str]) -> None:
    """Between nodes of two ranks, each sends a half in a codec; these halves are then exchanged exactly."""
    profile = chain([layer(number) for number in range(4)])
    proved = prove(hybrid(profile, 4, tensor=2, stages=2, micro_batches=2))
    costs = cluster_costs(cluster(nodes, 4 // nodes, inside="1Mbit/s", nic="1Mbit/s"))
    choose_codecs(proved, costs, ["bf16"])
    assert proved.plan.codecs == found


def test_a_search_counts_compressed_transfers() -> None:
    """Two stages over 10 Mbit/s: the model of the search and the simulator agree about their time."""
    profile = chain([layer(number, output=1 << 20, params=1 << 28) for number in range(2)])
    costs = unlike(["10Mbit/s", "10Gbit/s"])
    plain = search(profile, 2, costs, micro_batches=[1]).plans
    coded = search(profile, 2, costs, micro_batches=[1], codecs=["int8_block"]).plans
    saved = 2 * ((1 << 20) - transfer_codec("int8_block", "float32").wire(1 << 20)) * 8 / 10e6
    for one, other in ((plain[0].seconds, coded[0].seconds), (plain[0].step, coded[0].step)):
        assert len(plain[0].choice.stages) == len(coded[0].choice.stages) == 2
        assert one - other == pytest.approx(saved, rel=0.02, abs=4 * OVERHEAD)


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        ("int8", "unknown codec 'int8'; known:"),
        ("none", "codec 'none', of a plan"),
        ("powersgd", "powersgd"),
        ("delta", "delta"),
        ("exp_window", "exp_window"),
        ({"codec": "topk", "ratio": 7.0}, "ratio"),
        ({"ratio": 0.1}, "no codec"),
    ],
)  # fmt: skip
def test_codecs_that_cannot_be_are_refused(codec: Any, text: str) -> None:
    plan = hybrid(chain([layer(number) for number in range(3)]), 3, stages=3)
    with pytest.raises(InvalidArgument, match=text):
        plan.compress(0, codec)
    with pytest.raises(InvalidArgument, match=text):
        choose_codecs(prove(plan), unlike(["10Mbit/s"] * 3), [codec])


def test_rates_of_more_nodes_than_there_are_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"links\.nic\.rates: 3 rates; the cluster has 2 nodes"):
        unlike(["10Mbit/s"] * 3, nodes=2)
    with pytest.raises(ConfigError, match=r"links\.nic\.rates\[1\]: the unit is missing in '10'"):
        unlike(["10Mbit/s", "10"])
