"""`mcr.explain` and `mcr-plus explain`: the rule that decided, expected costs, and why the others lost."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiers import examples

import mcr_plus as mcr
from mcr_plus import registry, tables
from mcr_plus.backends import backend_class
from mcr_plus.backends.base import Availability, Support
from mcr_plus.backends.gloo.backend import GlooBackend
from mcr_plus.cli.main import main
from mcr_plus.communicator.gradient_policy import warn_of_unmatched
from mcr_plus.config.reader import load
from mcr_plus.core.message import Signature
from mcr_plus.core.units import parse_size
from mcr_plus.errors import ConfigError, InvalidArgument
from mcr_plus.rendezvous.world import World
from mcr_plus.selection import stage
from mcr_plus.selection.stage import built_in_table
from mcr_plus.tables.table import Query

K = 1024
TABLE = """\
version: 1
rules:
  - kind: all_reduce
    bytes: 0..64KiB
    backend: mpi
    measured:
      mpi: {8B: 1, 64KiB: 20}
      gloo: {8B: 205, 64KiB: 440}
      "quick:ring": {8B: 3}
      "quick:star": {8B: 3}
      nccl: {8B: 0.5}
  - kind: all_reduce
    bytes: 64KiB..
    backend: gloo
    measured:
      mpi: {1MiB: 100}
      gloo: {1MiB: 500}
  - kind: broadcast
    ranks: 2
    bytes: 0..
    backend: mpi
    measured: {mpi: {8B: 2, 1MiB: 200}}
  - {kind: broadcast, nodes: 1, bytes: 0.., backend: mpi}
  - {kind: broadcast, bytes: 0.., backend: gloo}
  - {kind: reduce, ranks_per_node: 3, bytes: 0.., backend: mpi}
  - {kind: reduce, bytes: 0.., backend: gloo}
  - {kind: send, bytes: 0.., backend: gloo}
  - {kind: all_gather, async: true, bytes: 0.., backend: gloo}
  - {kind: all_to_all, bytes: 0..64KiB, backend: mpi, measured: {mpi: {8B: 1}, gloo: {8B: 2}}}
  - {kind: all_to_all, bytes: 64KiB.., backend: gloo, measured: {mpi: {1MiB: 1000}, gloo: {1MiB: 500}}}
  - {kind: scatter, bytes: 0.., backend: "quick:ring", measured: {"quick:ring": {8B: 4}, gloo: {8B: 8}}}
"""


class QuickBackend(GlooBackend):
    """gloo under another name, with an algorithm to choose."""

    has_algorithms = True

    @classmethod
    def supports(cls, signature: Signature) -> Support:
        if signature.algorithm not in (None, "ring"):
            return Support("no", f"algorithm '{signature.algorithm}'; quick has ring")
        return super().supports(signature.replace(algorithm=None))


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(registry.BACKENDS, "quick", QuickBackend)
    path = tmp_path / "table.yaml"
    path.write_text(TABLE)
    return path


def config(folder: Path, text: str = "", backends: str = "mpi, gloo, quick", select: str = "") -> Path:
    path = folder / "run.yaml"
    path.write_text(
        f"version: 1\nbackends: [{backends}]\n"
        f"pipeline: [{{select: {{table: table.yaml{select}}}}}, {{dispatch: {{}}}}]\n{text}"
    )
    return path


def line_of(text: str) -> int:
    """Return the line of the first rule of the table that has `text` in it."""
    lines = TABLE.splitlines()
    found = next(number for number, line in enumerate(lines) if text in line)
    return 1 + max(number for number in range(found + 1) if lines[number].startswith("  - "))


def test_the_rule_that_decided(table: Path) -> None:
    way = mcr.explain("all_reduce", 8, config=config(table.parent))
    assert way["table_rule"] == f"{table}:3"
    assert way["expected_us"] == 1.0
    assert way["backends"] == ["mpi"]
    assert (way["kind"], way["bytes"], way["ranks"], way["nodes"], way["async_op"]) == (
        "all_reduce",
        8,
        2,
        1,
        False,
    )
    (choice,) = [step for step in way["steps"] if step["stage"] == "select"]
    assert f"{table}:3" in choice["decision"]
    assert {name: choice[name] for name in ("table_rule", "expected_us", "alternatives")} == {
        name: way[name] for name in ("table_rule", "expected_us", "alternatives")
    }
    large = mcr.explain("all_reduce", 1 << 20, config=config(table.parent))
    assert (large["table_rule"], large["expected_us"], large["backends"]) == (f"{table}:12", 500.0, ["gloo"])


@pytest.mark.parametrize(
    ("codec", "nbytes", "payload", "never_slower", "words"),
    [
        ("bf16", 32 * K, 16 * K, False, "`never_slower: true` would leave it out if encoding and decoding"),
        ("bf16", 32 * K, 16 * K, True, "`never_slower` leaves it out if encoding and decoding take more"),
        ("bf16", 64 * K, 32 * K, True, "`never_slower` leaves it out if encoding and decoding take more"),
    ],
)
def test_a_codec_is_compared_with_the_operation_without_it(
    table: Path, codec: str, nbytes: int, payload: int, never_slower: bool, words: str
) -> None:
    plain = config(table.parent)
    times = [mcr.explain("all_reduce", each, config=plain)["expected_us"] for each in (payload, nbytes)]
    path = table.parent / "compressed.yaml"
    options = f"{{codec: {codec}, never_slower: {str(never_slower).lower()}}}"
    path.write_text(plain.read_text().replace("[{select", f"[{{compress: {options}}}, {{select"))
    steps = mcr.explain("all_reduce", nbytes, config=path)["steps"]
    (step,) = [step for step in steps if step["stage"] == "compress"]
    assert (step["codec"], step["never_slower"]) == (codec, never_slower)
    assert [step["payload_us"], step["without_codec_us"]] == pytest.approx(times)
    assert words in step["comparison"]


def _comparison(folder: Path, kind: str, stages: str, never_slower: bool, **options: Any) -> tuple[str, str]:
    """Return the texts about a message or an asynchronous operation by bf16: its codec and its times."""
    path = folder / "compressed.yaml"
    rule = "{kind: '*', bytes: 0.., backend: gloo, measured: {gloo: {8B: 1, 1MiB: 100}}}"
    (folder / "table.yaml").write_text(f"version: 1\nrules: [{rule}]\n")
    stages += f"{{compress: {{codec: bf16, never_slower: {str(never_slower).lower()}}}}}, "
    stages += "{select: {table: table.yaml}}, {dispatch: {}}"
    path.write_text(f"version: 1\nbackends: [gloo]\npipeline: [{stages}]\n")
    steps = mcr.explain(kind, 64 * K, config=path, **options)["steps"]
    (step,) = [step for step in steps if step["stage"] == "compress"]
    return step["decision"], step["comparison"]


@pytest.mark.parametrize("never_slower", [False, True])
@pytest.mark.parametrize("kind", ["send", "recv"])
def test_never_slower_is_not_promised_for_messages(tmp_path: Path, kind: str, never_slower: bool) -> None:
    decision, comparison = _comparison(tmp_path, kind, "", never_slower)
    assert "slower" not in decision
    assert re.fullmatch(
        "expected: .* µs for what it sends, .* µs without the codec; `never_slower` is for collectives alone",
        comparison,
    )


@pytest.mark.parametrize("kind", ["all_reduce", "broadcast"])
def test_a_fused_operation_is_not_compared_as_if_it_were_sent_by_itself(tmp_path: Path, kind: str) -> None:
    fuse = "{fuse: {kinds: [all_reduce, broadcast]}}, "
    for never_slower, choice in (
        (True, "`never_slower` compares"),
        (False, "`never_slower: true` would compare"),
    ):
        _, comparison = _comparison(tmp_path, kind, fuse, never_slower, async_op=True)
        assert comparison.startswith("expected if sent by itself: ")
        assert comparison.endswith(f"without the codec; {choice} whole buckets")
        _, comparison = _comparison(tmp_path, kind, fuse, never_slower)  # waited for at once
        assert comparison.startswith("expected: ")
        assert "buckets" not in comparison


def test_a_codec_that_sends_longer_than_without_it(table: Path) -> None:
    path = table.parent / "slower.yaml"
    table.write_text(
        "version: 1\nrules:\n"
        "  - {kind: all_reduce, bytes: 0.., backend: mpi, measured: {mpi: {8B: 1, 64KiB: 20}}}\n"
        "  - {kind: all_gather, bytes: 0.., backend: mpi, measured: {mpi: {8B: 30, 64KiB: 50}}}\n"
    )
    stages = "{compress: {codec: int8_block}}, {select: {table: table.yaml}}, {dispatch: {}}"
    path.write_text(f"version: 1\nbackends: [mpi]\npipeline: [{stages}]\n")
    steps = mcr.explain("all_reduce", 64 * K, config=path)["steps"]
    (step,) = [step for step in steps if step["stage"] == "compress"]
    assert step["payload_us"] > step["without_codec_us"] == 20.0
    assert step["comparison"].endswith("20 µs without the codec; `never_slower: true` would leave it out")


def test_every_alternative_and_why(table: Path) -> None:
    found = mcr.explain("all_reduce", 8, config=config(table.parent))["alternatives"]
    assert list(found) == ["mpi", "gloo", "quick", "quick:ring", "quick:star", "nccl"]
    whys = {name: each["why"] for name, each in found.items()}
    assert whys == {
        "mpi": "chosen",
        "gloo": "expected to take 205 × as long",
        "quick": "not measured",
        "quick:ring": "expected to take 3 × as long",
        "quick:star": "algorithm 'star'; quick has ring",
        "nccl": "not part of this job",
    }
    times = {name: each["expected_us"] for name, each in found.items()}
    assert times == {
        "mpi": 1.0,
        "gloo": 205.0,
        "quick": None,
        "quick:ring": 3.0,
        "quick:star": None,
        "nccl": None,
    }
    assert {name: each["support"] for name, each in found.items()} == {
        "mpi": "native", "gloo": "native", "quick": "native", "quick:ring": "native", "quick:star": "no",
        "nccl": "no",
    }  # fmt: skip


def test_between_and_beyond_measured_sizes(table: Path) -> None:
    path = config(table.parent)
    inside, beyond = (mcr.explain("all_reduce", nbytes, config=path) for nbytes in (32 * K, 16 << 20))
    assert 1.0 < inside["expected_us"] < 20.0
    assert inside["alternatives"]["mpi"]["extrapolated"] is False
    assert beyond["expected_us"] > 500.0
    assert beyond["alternatives"]["gloo"]["extrapolated"] is True
    below = mcr.explain("all_reduce", 4, config=path)
    assert (below["expected_us"], below["alternatives"]["mpi"]["extrapolated"]) == (1.0, True)
    # 20 µs at 64 KiB come from another rule of the same key: one curve
    assert mcr.explain("all_reduce", 64 * K, config=path)["alternatives"]["mpi"]["expected_us"] == 20.0


def test_a_faster_alternative_is_not_hidden(table: Path) -> None:
    way = mcr.explain("all_reduce", 1 << 20, config=config(table.parent))
    why = f"measured to be 5 × as fast; {way['table_rule']} chooses otherwise and states no `reason`"
    assert way["alternatives"]["mpi"]["why"] == why


def test_explanation_has_the_reason_of_a_rule(table: Path) -> None:
    table.write_text(TABLE.replace("backend: gloo\n", "backend: gloo\n    reason: it hides better\n", 1))
    way = mcr.explain("all_reduce", 1 << 20, config=config(table.parent))
    why = "measured to be 5 × as fast; reason of the rule: it hides better"
    assert way["alternatives"]["mpi"]["why"] == why


MIXED = """
version: 1
rules:
  - kind: all_reduce
    bytes: 0..
    backend: mpi
    measured: {mpi: {8B: 1, 1KiB: 6, 64KiB: 10}, gloo: {8B: 3, 1KiB: 3, 64KiB: 80}}
"""


def test_alternative_faster_at_one_size_is_compared_over_the_whole_rule(table: Path) -> None:
    table.write_text(MIXED)
    way = mcr.explain("all_reduce", 1024, config=config(table.parent))
    assert way["backends"] == ["mpi"]
    why = way["alternatives"]["gloo"]["why"]  # the cube root of 3 · 0.5 · 8 is 2.29
    assert why == (
        "measured to be 2 × as fast at this size, "
        "but takes 2.29 × as long on average over the sizes of the rule, 0.."
    )


def test_times_that_read_alike_are_called_equal(table: Path) -> None:
    table.write_text(MIXED.replace("1KiB: 3,", "1KiB: 5.99,"))
    gloo = mcr.explain("all_reduce", 1024, config=config(table.parent))["alternatives"]["gloo"]
    assert gloo["why"] == "expected to take as long"


SHIPPED = sorted(Path(tables.__file__).with_name("builtin").glob("*.yaml"))


@pytest.mark.short("mpich")
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_built_in_tables_give_a_reason_where_their_figures_favour_another_choice(path: Path) -> None:
    rules = yaml.safe_load(path.read_text())["rules"]
    config = {
        "version": 1,
        "backends": ["msccl", "mpi", "gloo"],
        "pipeline": [{"select": {"table": str(path)}}, {"dispatch": {}}],
    }
    sizes = sorted({size for power in range(2, 28) for size in (1 << power, 3 << power - 1 & -4)})
    told = 0
    for kind, async_op in product(sorted({rule["kind"] for rule in rules}), (False, True)):
        for size in sizes[:: 100 // examples(100)] if kind != "barrier" else [0]:
            way = mcr.explain(kind, size, config=config, async_op=async_op)
            rule = rules[rule_index(path, way["table_rule"])]
            assert rule["kind"] == kind
            for name, each in way["alternatives"].items():
                faster = each["expected_us"] is not None and each["expected_us"] < way["expected_us"]
                if not faster or each["extrapolated"]:
                    assert "measured to be" not in each["why"]
                elif each["why"] != "expected to take as long":
                    told += 1
                    longer = on_average(rule, name)
                    reason = rule.get("reason") or f"takes {longer:.3g} × as long on average"
                    assert reason in each["why"], (kind, async_op, size, each["why"])
                    assert "reason" in rule or longer > 1
    assert told > 0


def rule_index(path: Path, place: str) -> int:
    """Return the number of the rule with its first line at `place`, file:line."""
    lines = path.read_text().splitlines()
    starts = [number for number, line in enumerate(lines, 1) if line.startswith("  - ")]
    return starts.index(int(place.rpartition(":")[2]))


def on_average(rule: dict[str, Any], name: str) -> float:
    """Return the ratio of `name`'s time to the choice's time: the geometric mean over the sizes of a rule."""
    low, _, high = rule["bytes"].partition("..")
    own, other = rule["measured"][rule["backend"]], rule["measured"][name]
    inside = [
        size
        for size in own
        if parse_size(size) >= parse_size(low) and (not high or parse_size(size) < parse_size(high))
    ]
    return math.exp(sum(math.log(other[size] / own[size]) for size in inside) / len(inside))


SMALL_ONLY = """
version: 1
rules:
  - kind: all_reduce
    bytes: 0..{end}
    backend: mpi
    measured: {{mpi: {{8B: 300, 32KiB: 400}}, gloo: {{8B: 310, 32KiB: 401}}}}
"""


def test_unmeasured_libraries_are_no_reason(table: Path) -> None:
    """An open end's choice may contradict its extrapolated figures; no measurement says otherwise."""
    table.write_text(SMALL_ONLY.format(end=""))
    way = mcr.explain("all_reduce", 25 << 20, config=config(table.parent))
    assert way["backends"] == ["mpi"]
    assert "measured only up to 32 KiB" in way["steps"][0]["decision"]
    gloo = way["alternatives"]["gloo"]
    assert gloo["expected_us"] < way["expected_us"]
    assert gloo["extrapolated"]
    assert gloo["why"] == f"not measured at this size; {way['table_rule']} decides"
    assert (
        "measured only up to"
        not in mcr.explain("all_reduce", 64 * K, config=config(table.parent))["steps"][0]["decision"]
    )


ONE_SIZE = """
version: 1
rules:
  - {kind: all_reduce, ranks: 2, bytes: 0.., backend: mpi,
     measured: {mpi: {64MiB: 118900}, gloo: {64MiB: 237800}, msccl: {64MiB: 59450}}}
"""


@pytest.mark.parametrize(
    ("nbytes", "ranks", "figure", "expected", "words"),
    [
        (64 * K, 2, "at_most", (118900, 118900), "at most 118900 µs"),
        (64 << 20, 2, "measured", (118900, None), "118900 µs"),
        (1 << 30, 2, "at_least", (118900 * 8.5, 118900), "at least 118900 µs"),
        (64 * K, 4, "unknown", (118900, None), "unknown"),
        (64 << 20, 4, "extrapolated", (118900, None), "118900 µs (extrapolated)"),
    ],
)
def test_sizes_beyond_a_single_measured_one_have_bounds(
    table: Path, nbytes: int, ranks: int, figure: str, expected: tuple[float, float | None], words: str
) -> None:
    """No text claims that one library is faster than another there."""
    table.write_text(ONE_SIZE)
    path = config(table.parent, backends="msccl, mpi, gloo")
    way = mcr.explain("all_reduce", nbytes, ranks=ranks, config=path)
    mpi, *others = (way["alternatives"][name] for name in ("mpi", "gloo", "msccl"))
    assert (mpi["figure"], mpi["extrapolated"]) == (figure, figure != "measured")
    assert (mpi["expected_us"], mpi["bound_us"]) == expected
    if ranks == 2:
        told = [f"not measured at this size; {way['table_rule']} decides"] * 2
        if figure == "measured":
            told = [
                "expected to take 2 × as long",
                f"measured to be 2 × as fast; {way['table_rule']} chooses otherwise and states no `reason`",
            ]
        assert [each["why"] for each in others] == told
    _, out = command("all_reduce", str(nbytes), "--ranks", str(ranks), "--config", str(path))
    (row,) = [line for line in out.splitlines() if line.startswith("  mpi ")]
    assert re.split(r"  +", row.strip())[1] == words
    bounds = "at most, at least: the time of the smallest or largest measured size; this size lies outside"
    assert (bounds in out.splitlines()) is (mpi["bound_us"] is not None)


def test_default_rules_of_a_table_leave_the_choice_to_the_built_in_preference(table: Path) -> None:
    rest = "  - {kind: all_reduce, bytes: 64KiB.., backend: built-in}\n"
    table.write_text(SMALL_ONLY.format(end="64KiB") + rest)
    way = mcr.explain("all_reduce", 25 << 20, config=config(table.parent, backends="gloo, mpi"))
    assert way["backends"] == ["gloo"]
    decision = way["steps"][0]["decision"]
    assert f"built-in preference, used by table {way['table_rule']}" in decision
    assert way["alternatives"]["mpi"]["why"] == "later in the built-in preference"
    small = mcr.explain("all_reduce", 8, config=config(table.parent, backends="gloo, mpi"))
    assert small["backends"] == ["mpi"]


def test_refusals_are_quoted_from_the_library(table: Path) -> None:
    path = config(table.parent, backends="mpi, gloo, nccl")
    nccl = mcr.explain("all_reduce", 8, config=path)["alternatives"]["nccl"]
    assert nccl["support"] == "no"
    assert nccl["why"] == nccl["how"] != ""
    assert nccl["expected_us"] is None  # measured, but not for this


SUM = Signature("all_reduce", torch.float32, (4,), 16, "world", 2, reduce_op="SUM")


@pytest.mark.parametrize("name", ["gloo", "mpi", "local"])
def test_libraries_without_algorithms_refuse_one_by_name(name: str) -> None:
    library, ranks = backend_class(name), 1 if name == "local" else 2
    assert library.supports(SUM.replace(ranks=ranks))
    refused = library.supports(SUM.replace(ranks=ranks, algorithm="ring"))
    assert not refused
    assert refused.how == f"algorithm 'ring'; {name} has none to choose from"


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_a_call_of_mpi_counts_its_elements_in_31_bits(dtype: torch.dtype) -> None:
    for numel in (2**31 - 1, 2**31):
        sent = SUM.replace(
            kind="broadcast", dtype=dtype, reduce_op=None, root=0, nbytes=numel * dtype.itemsize
        )
        assert bool(backend_class("mpi").supports(sent)) == (numel < 2**31)


def test_a_library_that_is_named_wins(table: Path) -> None:
    rules = "rules:\n  - match: {kind: all_reduce}\n    backend: gloo\n"
    way = mcr.explain("all_reduce", 8, config=config(table.parent, rules))
    assert way["table_rule"] is None
    assert way["expected_us"] == 205.0
    assert way["steps"][0]["rule"] == f"{table.parent / 'run.yaml'}:5: rules[0]"
    whys = {name: each["why"] for name, each in way["alternatives"].items()}
    assert whys["gloo"] == "chosen"
    assert whys["mpi"] == whys["quick:ring"] == "another was named"
    assert whys["nccl"] == "not part of this job"


def test_algorithms(table: Path) -> None:
    way = mcr.explain("scatter", 8, config=config(table.parent))
    assert way["backends"] == ["quick:ring"]
    assert way["alternatives"]["quick:ring"]["why"] == "chosen"
    assert way["alternatives"]["gloo"]["why"] == "expected to take 2 × as long"
    dispatched = way["steps"][-1]["operation"]
    assert "backend=quick" in dispatched
    assert "algorithm=ring" in dispatched
    with pytest.raises(mcr.Unsupported, match=r"backend 'quick:star' .* algorithm 'star'; quick has ring"):
        mcr.explain(
            "scatter",
            8,
            config=config(table.parent, 'rules: [{match: {kind: scatter}, backend: "quick:star"}]'),
        )


@pytest.mark.parametrize(
    ("kind", "ranks", "nodes", "rule"),
    [
        ("broadcast", 2, 1, "ranks: 2"),
        ("broadcast", 3, 1, "nodes: 1"),
        ("broadcast", 3, 2, "{kind: broadcast, bytes"),
        ("reduce", 3, 1, "ranks_per_node: 3"),
        ("reduce", 5, 2, "ranks_per_node: 3"),  # 3 and 2
        ("reduce", 6, 2, "ranks_per_node: 3"),
        ("reduce", 7, 2, "{kind: reduce, bytes"),  # 4 and 3
        ("reduce", 9, 3, "ranks_per_node: 3"),
        ("reduce", 6, 6, "{kind: reduce, bytes"),
    ],
)
def test_ranks_are_spread_over_nodes(table: Path, kind: str, ranks: int, nodes: int, rule: str) -> None:
    way = mcr.explain(kind, 8, ranks=ranks, nodes=nodes, config=config(table.parent))
    assert way["table_rule"] == f"{table}:{line_of(rule)}"
    assert (way["ranks"], way["nodes"]) == (ranks, nodes)


def test_costs_of_other_numbers_of_ranks_are_flagged(table: Path) -> None:
    found = mcr.explain("broadcast", 8, ranks=3, config=config(table.parent))
    assert found["expected_us"] == 2.0
    assert found["alternatives"]["mpi"]["extrapolated"] is True


def test_async_rules(table: Path) -> None:
    path = config(table.parent)
    way = mcr.explain("all_gather", 8, config=path, async_op=True)
    assert way["table_rule"] == f"{table}:{line_of('async: true')}"
    assert way["async_op"] is True
    assert "async" in way["steps"][0]["operation"]
    other = mcr.explain("all_gather", 8, config=path)
    assert (other["table_rule"], other["backends"]) == (None, ["mpi"])
    assert f"{table} has no rule for it" in other["steps"][0]["decision"]


@pytest.mark.parametrize("kind", ["send", "recv"])
@pytest.mark.parametrize("async_op", [False, True])
def test_both_ends_of_a_message_choose_the_same_library(table: Path, kind: str, async_op: bool) -> None:
    way = mcr.explain(kind, 8, config=config(table.parent), async_op=async_op)
    assert (way["table_rule"], way["backends"]) == (f"{table}:{line_of('kind: send')}", ["gloo"])


@pytest.mark.parametrize("strict", [False, True])
def test_table_measured_elsewhere_is_reported(table: Path, strict: bool) -> None:
    head = f"fingerprint: {{cpu: Elbrus, ranks: 64, nodes: 1}}\nstrict: {str(strict).lower()}\n"
    table.write_text(TABLE.replace("rules:", head + "rules:"))
    path = config(table.parent)
    (step, *_) = mcr.explain("reduce", 8, config=path)["steps"]
    cpu, ranks = step["measured_elsewhere"]
    assert cpu.startswith("cpu: ")
    assert cpu.endswith("measured with Elbrus")
    assert ranks == "ranks: 2, measured with 64"
    assert step["strict"] is strict
    _, out = command("reduce", "8", "--config", str(path))
    assert ranks in out
    assert ("would be refused" in out) is strict


def test_vector_kinds_use_the_configured_vector_size(table: Path) -> None:
    unsized = mcr.explain("all_to_all_v", 8, config=config(table.parent))
    assert (unsized["backends"], unsized["expected_us"]) == (["gloo"], None)
    sized = mcr.explain("all_to_all_v", 8, config=config(table.parent, select=", vector_size: 8B"))
    assert (sized["backends"], sized["expected_us"]) == (["mpi"], 1.0)
    assert sized["alternatives"]["gloo"]["why"] == "expected to take 2 × as long"


def test_an_ignored_rule_is_not_named(table: Path) -> None:
    assert mcr.explain("all_reduce", 8, ranks=1, config=config(table.parent))["table_rule"] is None


def test_measured_libraries_are_not_called_not_measured(table: Path) -> None:
    table.write_text(
        "version: 1\nrules: [{kind: send, bytes: 0.., backend: mpi, measured: {gloo: {8B: 5}}}]\n"
    )
    gloo = mcr.explain("send", 8, config=config(table.parent))["alternatives"]["gloo"]
    assert gloo["expected_us"] == 5.0
    assert gloo["why"] != "not measured"


def test_factors_are_plain_numbers(table: Path) -> None:
    table.write_text(TABLE.replace("gloo: {8B: 205,", "gloo: {8B: 12345,"))
    gloo = mcr.explain("all_reduce", 8, config=config(table.parent))["alternatives"]["gloo"]
    assert "e+" not in gloo["why"]


def test_no_table_no_costs() -> None:
    way = mcr.explain("all_reduce", 8, config={"version": 1, "backends": ["mpi", "gloo"]})
    assert (way["table_rule"], way["expected_us"]) == (None, None)
    assert way["alternatives"]["gloo"]["why"] == "later in the built-in preference"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"nodes": 0}, "nodes: expected 1 to 2, the number of ranks, got 0"),
        ({"nodes": 3}, "nodes: expected 1 to 2, the number of ranks, got 3"),
        ({"nbytes": 7}, "7 is not a whole number of float32"),
        ({"nodes": "two"}, "nodes: expected 1 to 2, the number of ranks, got 'two'"),
        ({"ranks": 0}, "ranks: expected an integer from 1, got 0"),
        ({"nbytes": -4}, "bytes: expected a size such as 64KiB or a number of bytes, got -4"),
        ({"nbytes": torch.ones(2)}, "bytes: expected a size .*, got tensor"),
        ({"dtype": "float"}, "unknown 'float'; known: float64, "),
        ({"kind": "allreduce"}, "unknown operation 'allreduce'; known: all_reduce, "),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        mcr.explain(**{"kind": "all_reduce", "nbytes": 8, **arguments})


def test_a_broken_table_is_named(table: Path) -> None:
    path = config(table.parent)
    table.write_text(TABLE.replace("8B: 1,", "8B: -1,"))
    with pytest.raises(ConfigError, match=rf"{re.escape(str(table))}:7: rules\[0\]\.measured\.mpi\.8B: "):
        mcr.explain("all_reduce", 8, config=path)


# -- the command ---------------------------------------------------------------------------------------------


def command(*words: str) -> tuple[int, str]:
    """Exit status and output of `mcr-plus explain`."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(io.StringIO()):
        patch.setattr(sys, "argv", ["mcr-plus", "explain", *words])
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue()
    return 0, out.getvalue()


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["all_reduce", "8"], ("all_reduce", 8, {})),
        (["all_reduce", "1MiB", "--dtype", "float16"], ("all_reduce", 1 << 20, {"dtype": "float16"})),
        (["broadcast", "8B", "--ranks", "6", "--nodes", "2"], ("broadcast", 8, {"ranks": 6, "nodes": 2})),
        (["send", "64KiB", "--async", "--tag", "x"], ("send", 64 * K, {"async_op": True, "tag": "x"})),
        (["all_to_all_v", "8"], ("all_to_all_v", 8, {})),
        (["scatter", "8"], ("scatter", 8, {})),
        (["all_reduce", "8", "--ranks", "1"], ("all_reduce", 8, {"ranks": 1})),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_gives_the_same_document(
    table: Path, words: list[str], arguments: tuple[str, int, dict[str, Any]]
) -> None:
    path = config(table.parent)
    kind, nbytes, more = arguments
    status, out = command(*words, "--config", str(path), "--json")
    assert status == 0
    assert json.loads(out) == mcr.explain(kind, nbytes, config=path, **more)


def test_text_names_the_rule_and_every_alternative(table: Path) -> None:
    status, out = command("all_reduce", "8", "--config", str(config(table.parent)))
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "all_reduce 8 B float32, 2 ranks on 1 host"
    assert f"  backend mpi (table {table}:3)" in lines
    assert out.count(str(table)) == 1
    assert lines[-1] == "=> mpi"
    rows = {line.split()[0]: line for line in lines if line.startswith("  ") and len(line.split()) > 3}
    for name, each in mcr.explain("all_reduce", 8, config=config(table.parent))["alternatives"].items():
        assert rows[name].endswith(each["why"])
        assert each["support"] in rows[name].split()
    assert "205 µs" in rows["gloo"]
    assert rows["nccl"].split()[1] == "-"


def test_text_names_rules_and_extrapolated_costs(table: Path) -> None:
    rules = "rules:\n  - match: {kind: all_reduce}\n    backend: gloo\n"
    path = config(table.parent, rules)
    _, out = command("all_reduce", "1GiB", "--config", str(path), "--nodes", "2", "--async", "--tag", "mlp")
    lines = out.splitlines()
    assert lines[0].endswith(", 2 ranks on 2 hosts, asynchronous, tag mlp")
    assert f"  rule: {path}:5: rules[0]" in lines
    assert "table rule" not in out
    (gloo,) = [line for line in lines if line.endswith("chosen")]
    assert re.search(r" \d{5} µs \(extrapolated\) ", gloo)


def test_text_explains_internal_names(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        "version: 1\npipeline: [{fuse: {}}, {compress: {codec: int8_block}}, {select: {}}, {dispatch: {}}]\n"
    )
    _, out = command("all_reduce", "1MiB", "--config", str(path), "--param", "w", "--shape", "512,512")
    (encoded,) = {line for line in out.splitlines() if line.startswith("select:")}
    assert re.fullmatch(r"select: all_gather uint8\[\d+\], encoded by int8_block", encoded)
    assert re.search(
        r"^  deadline 300 s; ranks compare what they issue "
        r"(at every call|the first time; later \w+ keeps operations that differ apart)$",
        out,
        re.MULTILINE,
    )
    assert not re.search(r"encoding=|key=|signature|\basync\b", out)
    operations = [step["operation"] for step in mcr.explain("all_reduce", "1MiB", config=path)["steps"]]
    assert any("encoding=int8_block:" in each for each in operations)  # programs get the names


def test_text_explains_exposed_times(table: Path) -> None:
    path = config(table.parent)
    meaning = "exposed: the time not hidden behind a computation that takes as long as the operation"
    for words, asynchronous in ((["--async"], True), ([], False)):
        _, out = command("all_reduce", "64", "--config", str(path), *words)
        assert (meaning in out.splitlines()) is asynchronous
        assert ("expected, exposed" in out) is asynchronous


@pytest.mark.parametrize("words", [["all_reduce", "8", "--nodes", "3"], ["all_reduce", "7"]], ids=" ".join)
def test_invalid_arguments_are_bad_usage(words: list[str]) -> None:
    assert command(*words) == (2, "")


# -- the tables that come with it ----------------------------------------------------------------------------


def world(size: int = 2, hosts: int = 1, **libraries: str) -> World:
    names = tuple(f"host{rank * hosts // size}" for rank in range(size))
    return World(0, size, names, 300.0, libraries=libraries)


@pytest.mark.parametrize(
    "job",
    [
        world(),
        world(gloo="gloo of torch 2.13.0"),
        world(mpi="MVAPICH 3.0"),
        world(1, mpi="Open MPI 5.0.11"),
        world(3, mpi="Open MPI 5.0.11"),
        world(2, 2, mpi="Open MPI 5.0.11"),
    ],
    ids=lambda job: f"{job.size} ranks, {len(set(job.hosts))} hosts, {dict(job.libraries)}",
)
def test_no_table_for_jobs_of_another_kind(job: World) -> None:
    assert built_in_table(job) is None


@pytest.mark.parametrize("mpi", ["Open MPI 5.0.11", "Open MPI 4.1.0", "MPICH 5.0.2"])
def test_two_ranks_on_a_host_have_a_table_of_libraries_that_are_there(mpi: str) -> None:
    found = built_in_table(world(mpi=mpi))
    assert found is not None
    assert found.lookup(Query("all_reduce", 8)) is not None
    assert {rule.backend.partition(":")[0] for rule in found.rules} <= {"msccl", "mpi", "gloo"}


def test_the_table_is_that_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, backend in (("openmpi", "mpi"), ("mpich", "gloo")):
        text = f'version: 1\nrules: [{{kind: "*", bytes: 0.., backend: {backend}}}]\n'
        (tmp_path / f"{name}_2ranks_1host.yaml").write_text(text)
    monkeypatch.setattr(stage, "FOLDER", tmp_path)
    for mpi, backend in (("Open MPI 5.0.11", "mpi"), ("MPICH 5.0.2", "gloo")):
        found = built_in_table(world(mpi=mpi))
        assert found is not None
        assert [rule.backend for rule in found.rules] == [backend]


def test_a_table_of_cpu_tensors_does_not_decide_about_cuda_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_class("nccl"), "availability", lambda: Availability(True, "2.28"))
    assert mcr.explain("all_reduce", 1 << 20, device="cuda")["backends"] == ["nccl"]


def test_sizes_may_be_written_as_in_a_configuration() -> None:
    assert mcr.explain("all_reduce", "1MiB")["bytes"] == 1 << 20
    with pytest.raises(InvalidArgument, match="wrong unit 'MB'"):
        mcr.explain("all_reduce", "1MB")


GRADIENTS = {
    "pipeline": [{"compress": {}}, {"select": {}}, {"dispatch": {}}],
    "rules": [
        {"match": {"param": "*.embedding"}, "compress": {"codec": "int8_block"}, "backend": "gloo"},
        {
            "match": {"kind": "all_reduce"},
            "compress": {"codec": "powersgd", "rank": 2, "exempt": {"max_ndim": 1}},
        },
    ],
}


def test_explanation_of_a_gradient() -> None:
    def decided(param: str, shape: list[int]) -> list[str]:
        nbytes = 4 * math.prod(shape)
        way = mcr.explain("all_reduce", nbytes, ranks=4, config=GRADIENTS, param=param, shape=shape)
        assert (way["param"], way["tag"], way["steps"][0]["stage"]) == (param, "gradients", "gradients")
        return [step["decision"] for step in way["steps"] if step["stage"] in ("gradients", "compress")]

    assert decided("net.embedding", [64, 100]) == [
        "codec int8_block, in a bucket of such gradients; backend gloo",
        "codec int8_block: all_to_all of encoded parts, summed in float32, encoded again, all_gather; "
        "25600 bytes become 6500",
    ]
    matrix = decided("net.weight", [64, 100])
    assert matrix[0] == "as its bucket"
    rounds = "all_reduce of 128 × float32 and 200 × float32"
    assert matrix[1] == f"codec powersgd: {rounds}; 25600 bytes become 1312"
    assert decided("net.bias", [6400])[0] == "uncompressed, in a bucket of such gradients"


def test_a_bucket_of_gradients_is_not_fused() -> None:
    pipeline = [
        {"fuse": {}},
        {"compress": {"codec": "bf16", "never_slower": True}},
        {"select": {}},
        {"dispatch": {}},
    ]
    found = mcr.explain("all_reduce", 4096, ranks=4, config={"pipeline": pipeline}, param="w")
    decisions = [step["decision"] for step in found["steps"] if step["stage"] == "fuse"]
    assert decisions == ["not fused: it is a bucket already, and sent as it is"]
    assert "by itself" not in str(found)
    assert "whole buckets" not in str(found)
    found = mcr.explain("all_reduce", 4096, ranks=4, config={"pipeline": pipeline}, async_op=True)
    (decision,) = [step["decision"] for step in found["steps"] if step["stage"] == "fuse"]
    assert "what is a bucket already (of mcr.wrap, " in decision


def test_only_the_rule_of_a_parameter_is_named_as_its_cause() -> None:
    """The later rule for all all_reduces matches the bucket but does not decide."""
    found = mcr.explain(
        "all_reduce", 25600, ranks=4, config=GRADIENTS, param="net.embedding", shape=[64, 100]
    )
    rules = {step["stage"]: step["rule"] for step in found["steps"]}
    assert rules["gradients"].endswith("rules[0]")
    assert rules["compress"] is None


def test_rules_for_parameters_that_a_model_lacks_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_unmatched(load({"version": 1, **GRADIENTS}), ["net.embedding", "net.bias"])
    assert not caplog.records
    warn_of_unmatched(load({"version": 1, **GRADIENTS}), ["net.embedded", "net.bias"])
    (record,) = caplog.records
    assert "rules[0]" in record.getMessage()
    assert "'*.embedding' matches no parameter" in record.getMessage()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("all_reduce", {"shape": [3, 5]}, r"shape: \(3, 5\) is not 16 elements"),
        ("all_to_all_v", {"shape": [16]}, "shape: sizes of all_to_all_v differ"),
        ("broadcast", {"param": "w"}, "param: gradients are all_reduces"),
        ("all_reduce", {"param": "w", "tag": "t"}, "param: gradients are all_reduces"),
    ],
)
def test_operations_that_are_no_gradients(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        mcr.explain(kind, 64, config=GRADIENTS, **options)


def test_a_rules_codec_that_cannot_take_an_operation_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "version: 1\npipeline:\n  - compress: {}\n  - select: {}\n  - dispatch: {}\n"
        "rules:\n  - match: {tag: counts}\n    compress: {codec: int8_block}\n"
    )
    found = mcr.explain("all_reduce", 8 * K, dtype="int64", tag="counts", config=path)
    (step,) = [step for step in found["steps"] if step["stage"] == "compress"]
    assert step["decision"].startswith("codec int8_block not used: codec int8_block takes float32, ")
    assert step["decision"].endswith(", not int64")
    assert step["rule"] == f"{path}:7: rules[0]"


@pytest.mark.parametrize(
    ("kind", "nbytes", "async_op", "chosen"),
    [
        ("all_reduce", "128KiB", False, "mpi"),
        ("all_reduce", "256KiB", False, "gloo"),
        ("reduce_scatter", "1MiB", True, "gloo"),
        ("all_gather", "4MiB", False, "mpi"),
        ("all_gather", "4MiB", True, "gloo"),  # beside a computation
        ("all_to_all_v", "4MiB", False, "mpi"),
        ("send", "4MiB", False, "gloo"),  # as an isend: its receiver may have chosen either
        ("send", "65540", False, "gloo"),  # above MPI's eager limit it would wait to be polled
        ("send", "64KiB", False, "mpi"),
    ],
)
def test_the_preference_between_hosts(kind: str, nbytes: str, async_op: bool, chosen: str) -> None:
    found = mcr.explain(kind, nbytes, ranks=2, nodes=2, async_op=async_op)
    assert [name for name in found["backends"] if name in ("mpi", "gloo")] == [chosen]
