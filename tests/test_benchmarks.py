"""The benchmark programs: what they conclude from figures, also from few of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import bench_codecs
import pytest
import torch
from bench_collectives import hold_out, report, summary
from two_hosts import why_not

from mcr_plus import registry
from mcr_plus.tuning.operations import Cell
from mcr_plus.tuning.points import Point
from mcr_plus.tuning.statistics import Timing


def row(kind: str, nbytes: int, way: str, us: float) -> dict[str, Any]:
    return {"kind": kind, "bytes": nbytes, "backend": way, "p50_us": us, "verified": True}


def point(cell: Cell, way: str, us: float) -> Point:
    return Point(cell, way, False, Timing(us, us, us, us, us, 9))


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
    table = Path(__file__).parents[1] / "mcr_plus/selection/tables/openmpi_2ranks_1host.yaml"
    rows = [row("barrier", 0, way, us) for way, us in (("mpi", 2.0), ("tuned", 2.0))]
    points = [point(Cell("barrier", 0), "mpi", 2.0)]
    assert hold_out(points) == {"mpi": []}
    text = report(rows, points, table, "a command")
    assert "| mpi alone / tuned, geometric mean | ≥ 1 | 1.00 |" in text
    assert "cost model" not in text


def test_every_second_size_is_held_out() -> None:
    curve = {8: 1.0, 16: 3.0, 32: 4.0, 64: 5.0, 128: 10.0}
    points = [point(Cell("reduce", nbytes), "mpi", us) for nbytes, us in curve.items()]
    # shown: 1, 4, 10; straight lines give 1 + 3 / 3 at 16 and 4 + 6 / 3 at 64
    assert hold_out(points)["mpi"] == pytest.approx([1 / 3, 1 / 5])


def test_two_hosts_say_why_they_cannot_be_had() -> None:
    reason = why_not()
    assert reason is None or reason


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
