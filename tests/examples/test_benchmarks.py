"""The benchmark programs: their conclusions from figures, also from few figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import bench_beside
import bench_break_even
import bench_codecs
import bench_local
import bench_training
import bench_two_hosts
import charts
import pytest
import torch
from bench_collectives import hold_out, report, summary
from bench_training import FLOAT32, METHODS, Run, rows_of, spread
from two_hosts import why_not

from mcr_plus import registry
from mcr_plus.compression.options import CompressOptions
from mcr_plus.config.reader import load
from mcr_plus.tables.statistics import Timing
from mcr_plus.tuning.measurements import Sample
from mcr_plus.tuning.operations import BenchCase


def row(kind: str, nbytes: int, way: str, us: float) -> dict[str, Any]:
    return {"kind": kind, "bytes": nbytes, "backend": way, "p50_us": us, "verified": True}


def sample(case: BenchCase, candidate: str, us: float) -> Sample:
    return Sample(case, candidate, False, Timing(us, us, us, us, us, 9))


def test_the_summary_of_figures() -> None:
    rows = [
        *(
            row("reduce", 1024, way, us)
            for way, us in (("mpi", 2.0), ("gloo", 8.0), ("tuned", 2.0), ("torch", 4.0))
        ),
        *(
            row("reduce", 4096, way, us)
            for way, us in (("mpi", 9.0), ("gloo", 4.0), ("tuned", 5.0), ("torch", 45.0))
        ),
        *(row("reduce", 8, way, us) for way, us in (("mpi", 1.0), ("tuned", 3.0))),
    ]
    found = {what: measured for what, _, measured in summary(rows)}
    assert found["tuned / best single, worst from 1 KiB on"] == "1.25 (reduce 4KiB)"
    assert found["… cells above 1.05, of those from 1 KiB on"] == "1 of 2"
    assert found["tuned / best single, geometric mean from 1 KiB on"] == f"{math.sqrt(1.25):.3f}"
    assert found["gloo alone / tuned, geometric mean"] == f"{math.sqrt(4 * 0.8):.2f}"
    assert found["mpi alone / tuned, geometric mean"] == f"{(1 * 1.8 / 3) ** (1 / 3):.2f}"
    assert found["torch.distributed gloo / tuned, geometric mean"] == f"{math.sqrt(2 * 9):.1f}"


def test_small_sizes_alone_have_a_summary_and_a_report() -> None:
    table = Path(__file__).parents[2] / "mcr_plus/tables/builtin/openmpi_2ranks_1host.yaml"
    rows = [row("barrier", 0, way, us) for way, us in (("mpi", 2.0), ("tuned", 2.0))]
    points = [sample(BenchCase("barrier", 0), "mpi", 2.0)]
    assert hold_out(points) == {"mpi": []}
    text = report(rows, points, table, "a command")
    assert "| mpi alone / tuned, geometric mean | ≥ 1 | 1.00 |" in text
    assert "cost model" not in text


def test_every_second_size_is_held_out() -> None:
    curve = {8: 1.0, 16: 3.0, 32: 4.0, 64: 5.0, 128: 10.0}
    points = [sample(BenchCase("reduce", nbytes), "mpi", us) for nbytes, us in curve.items()]
    # shown: 1, 4, 10; straight lines give 1 + 3 / 3 at 16 and 4 + 6 / 3 at 64
    assert hold_out(points)["mpi"] == pytest.approx([1 / 3, 1 / 5])


def test_unavailable_hosts_give_a_reason() -> None:
    reason = why_not()
    assert reason is None or reason


@pytest.mark.long
def test_every_codec_has_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "figures.json"
    bench_codecs.main(["--size", "256KiB", "--threads", "1", "--rounds", "1", "--json", str(target)])
    rows = json.loads(target.read_text())
    assert {row["codec"].split()[0] for row in rows} == set(registry.names("codecs"))
    calls = {row["call"] for row in rows if row["codec"] == "int8_block"}
    assert calls == {"encode", "decode", "accumulate", "reduce", "eager"}
    assert [row["call"] for row in rows if row["codec"] == "powersgd"] == ["exchange"]
    assert all(row["gbs"] > 0 and row["copy_gbs"] > 0 and 0 < row["bits"] < 33 for row in rows)
    assert "int8_block" in capsys.readouterr().out


def test_wrong_results_are_not_timed() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    bench_codecs.verify("right", values * 1.01, values, 0.05, sparse=False)
    half = torch.where(torch.arange(1000) % 2 == 0, values, 0.0)
    bench_codecs.verify("right", half * 2, values, 0.05, sparse=True)
    for wrong, sparse in (
        (values.flip(0), True),
        (half, False),
        (values * torch.nan, False),
        (values * 0, True),
    ):
        with pytest.raises(SystemExit, match="wrong: relative error"):
            bench_codecs.verify("wrong", wrong, values, 0.65, sparse=sparse)


# --- training with codecs -----------------------------------------------------------------------------


def test_final_losses_are_compared_seed_by_seed() -> None:
    def trained(way: str, seed: int, wire: int, *ends: float) -> Run:
        return Run("gpt", way, seed, wire, [9.0] * (20 * len(ends) - len(ends)) + list(ends))

    rows = rows_of(
        [
            trained(FLOAT32, 0, 100, 1.0, 3.0),
            trained("bf16", 0, 50, 1.0, 3.2),
            trained(FLOAT32, 1, 100, 4.0, 4.0),
            trained("bf16", 1, 50, 4.0, 3.2),
        ]
    )
    assert [(row.way, row.wire) for row in rows] == [(FLOAT32, 1.0), ("bf16", 0.5)]
    assert rows[0].finals == [2.0, 4.0]
    assert rows[0].differences == [0.0, 0.0]
    assert rows[1].differences == pytest.approx([0.05, -0.1])
    assert spread(rows[0]) == pytest.approx(2 / 3)


def test_methods_are_configurations_that_match_their_names() -> None:
    for name, method in METHODS.items():
        config = load(method.config())
        rule = config.rule_for("all_reduce", 1 << 20, "float32", "gradients")
        options = config.options("compress", rule)
        assert isinstance(options, CompressOptions)
        assert name.split()[0] == (options.codec if method.gradients else FLOAT32)
        assert (options.codec == "none") == (not method.gradients)
        assert (options.error_feedback is not None) == name.endswith("EF")
        assert options.exempt is None or options.exempt.covers("bias", 1, 1 << 20)
        exchange = config.options(
            "compress", config.rule_for("all_to_all_v", None, "float32", "moe.dispatch")
        )
        assert isinstance(exchange, CompressOptions)
        assert exchange.feedback is None


@pytest.mark.long
def test_curves_are_smoothed_and_drawn(tmp_path: Path) -> None:
    assert bench_training.smoothed([1, 3, 5, 7], 2).tolist() == [2, 4, 6]
    runs = [Run("gpt", way, 0, 1, [3.0, 2.0, 1.0]) for way in METHODS]
    target = tmp_path / "losses.png"
    bench_training.plot(runs, target)
    assert target.read_bytes().startswith(b"\x89PNG")


def test_steps_over_a_link_with_codecs() -> None:
    for way in (*bench_two_hosts.CANDIDATES, *bench_two_hosts.CODECS):
        config = load(bench_two_hosts.pipeline(Path("table.yaml"), way))
        assert bool(config.rules) == (way in bench_two_hosts.CODECS)
    assert "powersgd 4 + EF" not in bench_two_hosts.suited(bench_two_hosts.CODECS, "dlrm")
    found = dict.fromkeys(bench_two_hosts.CANDIDATES, 40.0) | {"bf16": 25.0, bench_two_hosts.TORCH: 50.0}
    rows = bench_two_hosts.codec_rows("gpt", found, dict.fromkeys(found, 1 << 20))
    assert rows[1] == ["gpt", "bf16", "1.00", "25.0", "1.60", "2.00"]


# --- break-even ---------------------------------------------------------------------------------------

SIZES = [1 << 16, 1 << 20, 1 << 24]


def test_break_even_by_the_lines() -> None:
    raw = bench_break_even.fitted({size: 1e-3 + size / 1e8 for size in SIZES}, 1e-3)
    assert (raw.latency, raw.per_byte) == pytest.approx((1e-3, 1e-8))
    # adds 2 ms, and saves 3/4 of 10 ns per byte, less 2.5 ns of computing
    encoded = bench_break_even.predicted(raw, rate=4, codec_per_byte=2.5e-9, latency=3e-3)
    size = bench_break_even.crossing(raw, encoded)
    assert size == pytest.approx(2e-3 / 5e-9)
    assert raw.at(size) == pytest.approx(encoded.at(size))
    slow = bench_break_even.predicted(raw, rate=4, codec_per_byte=7.6e-9, latency=0)
    assert bench_break_even.crossing(raw, slow) == math.inf
    assert bench_break_even.fitted({1000: 2.0, 2000: 1.0}, 0.0).per_byte == pytest.approx(2.5 / 4.25e3)


def test_break_even_from_measurements() -> None:
    raw = dict.fromkeys(SIZES, 1.0)
    crossing = bench_break_even.measured_crossing
    assert crossing(raw, dict(zip(SIZES, (4.0, 0.5, 0.5), strict=True))) == pytest.approx(
        SIZES[0] * (SIZES[1] / SIZES[0]) ** (2 / 3)
    )
    assert SIZES[1] < crossing(raw, dict(zip(SIZES, (0.5, 2.0, 0.5), strict=True))) < SIZES[2]
    assert crossing(raw, dict(zip(SIZES, (0.5, 0.5, 2.0), strict=True))) == math.inf
    assert crossing(raw, dict.fromkeys(SIZES, 0.5)) == 0
    text = bench_break_even.crossing_text
    assert [text(each, *SIZES[::2]) for each in (0, 3 << 19, 1 << 30, math.inf)] == [
        "below 64KiB",
        "1.5 MiB",
        "above 16MiB",
        "never",
    ]


def test_break_even_has_a_report_and_a_picture(tmp_path: Path) -> None:
    sizes = [bench_break_even.TINY, *SIZES]
    names = ("int8_block", "bf16", "topk")
    times = {bench_break_even.RAW: {size: 1e-4 + size / 1e8 for size in sizes}}
    local: dict[str, dict[int, float]] = {}
    for name in names:
        codec = bench_break_even.payload_codec(name)
        values = torch.randn(1 << 16)
        local[name] = {values.nbytes: bench_break_even.codec_seconds(codec, values, 1)}
        local[name] |= {size: size / 1e9 for size in sizes}
        smaller = bench_break_even.times_smaller(codec, SIZES[-1])
        times[name] = {size: 1e-3 + size / 1e8 / smaller + size / 1e9 for size in sizes}
    found = bench_break_even.found_of("1gbit", times, local)
    for name, line in found.codecs.items():  # the given bandwidth comes out, but for the 1 KiB in the latency
        assert [line.at(size) for size in SIZES] == pytest.approx(
            [times[name][size] for size in SIZES], rel=0.01
        )
        predicted, measured = found.break_even(name)
        assert predicted.split()[1] == measured.split()[1] == "KiB"
    text = bench_break_even.text_of([found], "a command")
    assert "α = 110 µs, B = 0.100 GB/s" in text
    assert text.count("| int8_block |") == 1 + len(SIZES)
    bench_break_even.plot([found], tmp_path / "lines.png")
    assert (tmp_path / "lines.png").stat().st_size > 1000


def test_compression_factors_of_payloads() -> None:
    smaller = {
        name: bench_break_even.times_smaller(bench_break_even.payload_codec(name), 1 << 20)
        for name in ("bf16", "int8_block", "topk")
    }
    assert smaller == pytest.approx({"bf16": 2, "int8_block": 3.94, "topk": 66.6}, rel=0.01)
    with pytest.raises(SystemExit, match="powersgd has no payloads"):
        bench_break_even.payload_codec("powersgd")


# --- on a busy machine --------------------------------------------------------------------------------


def beside(way: str, nbytes: int, p50: float, p95: float) -> dict[str, Any]:
    return {"case": "1", "ranks": 2, "bytes": nbytes, "way": way, "p50": p50, "p95": p95, "mean": p50}


@pytest.mark.long
def test_the_default_is_compared_with_torch_size_by_size() -> None:
    rows = [
        beside(bench_beside.DEFAULT, 8, 10.0, 50.0),
        beside(bench_beside.TORCH, 8, 80.0, 100.0),
        beside(bench_beside.DEFAULT, 1024, 40.0, 130.0),
        beside(bench_beside.TORCH, 1024, 20.0, 100.0),
        beside("mpi", 1024, 5.0, 6.0),
    ]
    assert bench_beside.summary(rows) == [["1", "2", "2.00 ×", "0.50 ×", "2.00 ×", "1.30", "1 of 2"]]
    found = {"operations": rows, "examples": [], "skipped": {"within 1.5 cores": "no cgroup"}}
    text = bench_beside.report(found, "a command")
    assert "## beside one busy process, 2 ranks" in text
    assert "| 8 | 10 / 50 | 80 / 100 |  |" in text
    assert "Skipped: within 1.5 cores: no cgroup" in text


@pytest.mark.long
def test_operations_are_measured_beside_a_busy_process(tmp_path: Path) -> None:
    target, words = tmp_path / "found.json", "--parts operations --cases 1 --ranks 2 --sizes 8 --rounds 1"
    bench_beside.main([*words.split(), "--calls", "3", "--json", str(target)])
    found = json.loads(target.read_text())["operations"]
    assert {row["way"] for row in found} >= {bench_beside.DEFAULT, bench_beside.TORCH, "msccl", "gloo"}
    assert all(0 < row["p50"] <= row["p95"] for row in found)


@pytest.mark.parametrize("style", ["light", "dark"])
def test_the_pictures_show_the_measured_figures(style: str) -> None:
    pictures = {
        name: (charts.IMAGES / f"{name}-{style}.svg").read_text() for name in ("gains", "latency", "pipeline")
    }
    gains = charts.gains()
    assert {"DLRM, one host", "GPT, 1 Gbit/s", "DDP, MLP of 0.3 M parameters"} <= gains.keys()
    for name, times in gains.items():
        assert name in pictures["gains"]
        assert f"{times:.2f} ×" in pictures["gains"]
    points = charts.latencies()
    assert points["mcr_plus"].keys() == points["torch gloo"].keys() == points["Intel MPI"].keys()
    assert points["mcr_plus"].keys() >= {8, 1 << 10, 1 << 16, 1 << 20, 1 << 24}
    for name in charts.LABELS.values():
        assert name in pictures["latency"]
    assert [name for name in registry.STAGE_ORDER if f">{name}<" not in pictures["pipeline"]] == []


def test_figures_are_read_from_the_table_under_their_heading() -> None:
    text = "# a\n\n| x | y |\n|---|---|\n| 1 | 2 |\n\n## b\n\n| z |\n| --- |\n| 3 |\n| 4 |\n"
    assert charts.tables(text) == {"a": [{"x": "1", "y": "2"}], "b": [{"z": "3"}, {"z": "4"}]}


def outcome(way: str, held_out: float, seconds: float, sent: float) -> dict[str, Any]:
    return {
        "way": way, "held_out": held_out, "losses": [0.0] * 10, "seconds": [seconds], "compute": 0.1,
        "bytes_per_token": sent, "tokens_per_second": 100 / seconds, "waiting": seconds / 4,
        "outer": seconds / 8, "processor": 2.0, "processor_alone": 1.5,
    }  # fmt: skip


def test_ways_over_slow_links_are_relative_to_ddp() -> None:
    runs = {
        "ddp": [outcome("ddp", 2.0, 50.0, 800.0), outcome("ddp", 1.0, 50.0, 800.0)],
        "local": [outcome("local", 2.2, 2.0, 4.0), outcome("local", 1.0, 2.0, 4.0)],
    }
    plain, local = bench_local.quality_rows(runs)
    assert plain == ["ddp", "1.5000", "1.0000", "1.0000 1.0000", "800.0", "1", "1.0"]
    assert local == ["local", "1.6000", "1.0500", "1.1000 1.0000", "4.0", "200", "25.0"]
    slow, fast = bench_local.speed_rows("100mbit", {way: each[0] for way, each in runs.items()})
    shares = ["75.0%", "25.0%", "12.5%"]  # by processor time, waiting, outer steps
    assert slow == ["ddp", "100mbit", "10", "5000.0", "2.0%", *shares, "2.0", "1.0", "800", "1"]
    assert fast == ["local", "100mbit", "10", "200.0", "50.0%", *shares, "50.0", "25.0", "4", "200"]


def test_slow_links_are_given_few_steps() -> None:
    """In 20 s, 10 Mbit/s carry half of the gradients (51 MB), and 1 Gbit/s carries them 49 times."""
    ways = ("ddp", "wrap int8", "wrap topk", "local", "local topk")
    assert [bench_local.steps_of(way, "10mbit", 240, 30) for way in ways] == [2, 2, 10, 90, 240]
    assert [bench_local.steps_of(way, "1gbit", 240, 30) for way in ways] == [49, 49, 240, 240, 240]
