"""Fingerprints: differences that count as another place, and a job's message about a table from one."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import own_rank, run_ranks

import mcr_plus as mcr
from mcr_plus import registry
from mcr_plus.backends import library_versions
from mcr_plus.backends.nccl import NcclBackend
from mcr_plus.core.environment import cores
from mcr_plus.errors import ConfigError
from mcr_plus.tables import fingerprint
from mcr_plus.tables.fingerprint import (
    FACTS,
    cpu_name,
    differences,
    fingerprint_here,
    merged,
)

HERE = {"torch": ("2.13.0+cpu",), "mcr_plus": ("0.1.0",), "mpi": ("Open MPI 5.0.11",), "ranks": ("2",)}


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, []),
        (HERE, []),
        ({"torch": ("2.13.9",)}, []),
        ({"torch": ("2.13",)}, []),
        ({"torch": ("2.13+cu130",)}, []),
        ({"mcr_plus": ("0.1.7.dev3",)}, []),
        ({"torch": ("2.1.13",)}, ["torch: 2.13.0+cpu, measured with 2.1.13"]),
        ({"torch": ("2.12.0+cpu",)}, ["torch: 2.13.0+cpu, measured with 2.12.0+cpu"]),
        ({"torch": ("3.13.0",)}, ["torch: 2.13.0+cpu, measured with 3.13.0"]),
        ({"mcr_plus": ("0.10.0",)}, ["mcr_plus: 0.1.0, measured with 0.10.0"]),
        ({"mpi": ("Open MPI 5.0.10",)}, ["mpi: Open MPI 5.0.11, measured with Open MPI 5.0.10"]),
        ({"mpi": ("MPICH 5.0.2", "Open MPI 5.0.11")}, []),
        ({"mpi": ("MPICH 5", "MPICH 4")}, ["mpi: Open MPI 5.0.11, measured with MPICH 5 or MPICH 4"]),
        ({"ranks": ("4", "8")}, ["ranks: 2, measured with 4 or 8"]),
        ({"ranks": ("2", "4")}, []),
        ({"gpu": ("H200",), "nccl": ("2.28",)}, []),  # not known here
        (
            {"ranks": ("3",), "gpu": ("H200",), "mpi": ("MPICH 5",), "torch": ("2.13.1",)},
            ["ranks: 2, measured with 3", "mpi: Open MPI 5.0.11, measured with MPICH 5"],
        ),
    ],
)  # fmt: skip
def test_differences(stated: dict[str, tuple[str, ...]], expected: list[str]) -> None:
    assert differences(stated, HERE) == expected


def test_facts_of_one_side_only_are_no_difference() -> None:
    assert differences({"ranks": ("2",)}, {**HERE, "cpu": ("unheard of",)}) == []
    assert differences(HERE, {}) == []


def test_merged_fingerprint_has_common_facts_with_every_value() -> None:
    one = {"torch": ("2.13.0",), "ranks": ("2",), "cpu": ("a",)}
    two = {"ranks": ("4", "2"), "torch": ("2.13.0",), "gpu": ("none",)}
    three = {"torch": ("2.12.0",), "ranks": ("8",), "cpu": ("a",), "gpu": ("none",)}
    assert merged([]) == {}
    assert merged([one]) == one
    assert merged([one, two]) == {"torch": ("2.13.0",), "ranks": ("2", "4")}
    assert merged([one, two, three]) == {"torch": ("2.13.0", "2.12.0"), "ranks": ("2", "4", "8")}
    assert merged([one, {}]) == {}


def test_each_place_fits_the_merged_fingerprint() -> None:
    places = [{"torch": ("2.13.0",), "ranks": ("2",)}, {"torch": ("2.12.1",), "ranks": ("4",), "cpu": ("a",)}]
    assert [differences(merged(places), place) for place in places] == [[], []]


def test_the_facts_of_a_job() -> None:
    found = fingerprint_here({"mpi": "Open MPI 5.0.11"}, ranks=6, nodes=2, ranks_per_node=4)
    assert set(found) == {*FACTS, "mpi"}
    assert all(len(values) == 1 and isinstance(values[0], str) and values[0] for values in found.values())
    plain = {name: value for name, (value,) in found.items()}
    assert (plain["ranks"], plain["nodes"], plain["ranks_per_node"]) == ("6", "2", "4")
    assert plain["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert plain["mcr_plus"] == version("mcr_plus")
    assert plain["cores"] == str(cores())
    assert plain["mpi"] == "Open MPI 5.0.11"
    assert (plain["gpu"] == "none") is not torch.cuda.is_available()


def test_the_processor_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    assert cpu_name() == (named[0] if named else platform.machine())
    cpu_name.cache_clear()
    monkeypatch.setattr(fingerprint, "Path", lambda _: Path("/nonexistent"))
    assert cpu_name() == platform.machine()
    cpu_name.cache_clear()


def test_libraries_are_those_of_backends_that_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named:
        @classmethod
        def library_version(cls) -> str:
            return "Named 1.2"

    monkeypatch.setitem(registry.BACKENDS, "named", Named)
    assert library_versions(["named", "local"]) == {"named": "Named 1.2"}
    assert library_versions([]) == {}


def test_nccl_from_a_path_of_ones_own_is_named_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = {"own/libnccl.so.2": SimpleNamespace(version_text="2.28.3")}
    monkeypatch.setattr(NcclBackend, "library", "own/libnccl.so.2")
    monkeypatch.setattr("mcr_plus.backends.nccl.abi.load", loaded.__getitem__)
    assert library_versions(["nccl"]) == {"nccl": "NCCL 2.28.3"}


# -- on ranks ------------------------------------------------------------------------------------------------


class Lines(logging.Handler):
    """Keeps the logged lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def write(path: Path, facts: dict[str, Any], *, strict: bool = False) -> None:
    lines = [f"strict: {json.dumps(strict)}", f"fingerprint: {json.dumps(facts)}"]
    path.write_text("\n".join(["version: 1", *lines, 'rules: [{kind: "*", bytes: 0.., backend: gloo}]', ""]))


def join(log: Lines, table: str, rules: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Run one operation under a table; return the log, the error and the result."""
    log.lines.clear()
    pipeline = [{"select": {"table": table}}, {"dispatch": {}}]
    config = {"version": 1, "backends": ["mpi", "gloo"], "pipeline": pipeline, "rules": list(rules)}
    x = torch.ones(2)
    done: list[Any] = []
    raised = None
    try:
        with mcr.init(config, timeout=10):
            with mcr.record() as records:
                mcr.all_reduce(x)
            done = [*x.tolist(), records.records[0].backend]
    except ConfigError as error:
        raised = str(error)
    return {"logged": list(log.lines), "raised": raised, "done": done}


def heard() -> Lines:
    log = Lines()
    logging.getLogger("mcr_plus").addHandler(log)
    return log


def tables_and_places(folder: str) -> dict[str, Any]:
    log = heard()
    wrong = {"torch": "1.2.3", "mpi": ["MPICH 9", "MPICH 8"], "ranks": 2}
    with mcr.init({"version": 1, "backends": ["mpi", "gloo"]}) as comm:
        here = fingerprint_here(library_versions(["mpi", "gloo"]), ranks=2, nodes=1, ranks_per_node=2)
        right = {name: list(values) for name, values in here.items()}
        facts: dict[str, dict[str, Any]] = {
            "wrong": wrong, "strict": wrong, "right": right, "strictly_right": right, "none": {}
        }  # fmt: skip
        if comm.rank == 0:
            for name, each in facts.items():
                write(Path(folder) / f"{name}.yaml", each, strict="strict" in name)
        mcr.barrier()
    found = {name: join(log, f"{folder}/{name}.yaml") for name in facts}
    found["again"] = join(log, f"{folder}/right.yaml")
    return {"mpi": right["mpi"][0], **found}


def test_tables_measured_elsewhere(tmp_path: Path) -> None:
    first, second = (result.value for result in run_ranks(tables_and_places, 2, args=[str(tmp_path)]))
    works = [2.0, 2.0, "gloo"]
    for found in (first, second):
        for name in ("right", "strictly_right", "none", "again"):
            assert found[name] == {"logged": [], "raised": None, "done": works}, name
        assert found["wrong"]["done"] == works
        assert found["wrong"]["raised"] is None

    both = [
        f"torch: {version('torch')}, measured with 1.2.3",
        f"mpi: {first['mpi']}, measured with MPICH 9 or MPICH 8",
    ]
    (warning,) = first["wrong"]["logged"]
    assert warning.startswith(f"WARNING {tmp_path}/wrong.yaml: measured elsewhere than rank 0 runs: ")
    assert all(text in warning for text in both)
    assert "ranks:" not in warning
    assert second["wrong"]["logged"] == []

    assert first["strict"]["raised"] == second["strict"]["raised"]
    assert first["strict"]["raised"].startswith(f"{tmp_path}/strict.yaml: ")
    assert all(text in first["strict"]["raised"] for text in both)
    assert first["strict"]["done"] == second["strict"]["done"] == []
    assert first["strict"]["logged"] == second["strict"]["logged"] == []


def only_the_second_rank_differs(folder: str) -> dict[str, Any]:
    log = heard()
    with mock.patch("mcr_plus.tables.fingerprint.cpu_name", return_value=f"processor {own_rank()}"):
        return {name: join(log, f"{folder}/{name}.yaml") for name in ("wrong", "strict")}


def test_a_difference_on_one_rank_is_reported_on_all(tmp_path: Path) -> None:
    for name in ("wrong", "strict"):
        write(tmp_path / f"{name}.yaml", {"cpu": "processor 0"}, strict=name == "strict")
    first, second = (r.value for r in run_ranks(only_the_second_rank_differs, 2, args=[str(tmp_path)]))
    text = "measured elsewhere than rank 1 runs: cpu: processor 1, measured with processor 0"
    assert first["wrong"]["logged"] == [
        f"WARNING {tmp_path}/wrong.yaml: {text}; `mcr-plus tune` measures here"
    ]
    assert second["wrong"]["logged"] == []
    assert first["strict"]["raised"] == second["strict"]["raised"]
    assert first["strict"]["raised"].startswith(f"{tmp_path}/strict.yaml: {text}")


def one_table_in_many_places(folder: str) -> list[dict[str, Any]]:
    log = heard()
    kinds = ("send", "reduce")
    rules = [{"match": {"kind": kind}, "select": {"table": f"{folder}/0.yaml"}} for kind in kinds]
    return [join(log, f"{folder}/0.yaml", rules), join(log, f"{folder}/{own_rank()}.yaml")]


def test_a_table_is_identified_by_its_content(tmp_path: Path) -> None:
    """A table named several times is one table, and so is a table with another path on every rank."""
    for rank in (0, 1):
        write(tmp_path / f"{rank}.yaml", {"torch": "1.2.3"})
    first, second = (r.value for r in run_ranks(one_table_in_many_places, 2, args=[str(tmp_path)]))
    assert [len(found["logged"]) for found in first] == [1, 1]
    assert [len(found["logged"]) for found in second] == [0, 0]
    assert all(found["done"] == [2.0, 2.0, "gloo"] for found in (*first, *second))
