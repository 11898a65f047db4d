"""`mcr-plus plan --parallel`: its output, files and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import Answer, mcr_plus
from plan_blocks import chain, layer

from mcr_plus.plans.blocks import Profile
from mcr_plus.plans.emit import TorchPlan, emit
from mcr_plus.plans.plan_file import load_plan
from mcr_plus.plans.proof import prove

MIB = 1 << 20
CLUSTER = """\
nodes: 2
ranks_per_node: 2
links:
  inside: {rate: 10GB/s, latency: 2us}
  nic: {rate: 1Gbit/s, latency: 20us}
"""


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    return chain([layer(number, params=4 * MIB, saved=8 * MIB, output=MIB) for number in range(4)])


@pytest.fixture
def folder(tmp_path: Path, profile: Profile) -> Path:
    profile.save(tmp_path / "profile.json")
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    return tmp_path


def plan(folder: Path, *words: object, topology: bool = True) -> Answer:
    given = ("--topology", folder / "cluster.yaml") if topology else ()
    return mcr_plus("plan", "--parallel", folder / "profile.json", *given, *words)


def test_the_document(folder: Path) -> None:
    answer = plan(folder, "--memory", "60MiB", "--json")
    assert (answer.returncode, answer.stderr) == (0, "")
    document = json.loads(answer.stdout)
    assert document.keys() == {"ranks", "origin", "bound_ms", "gap", "tried", "plans"}
    assert document["ranks"] == 4
    plans = document["plans"]
    assert 1 <= len(plans) <= 4
    assert plans[0].keys() == {
        "data", "tensor", "micro_batches", "held", "outside", "stages", "recompute", "step_ms", "model_ms",
        "peak_bytes", "codecs", "schedule", "slices", "sharded", "tensor_blocks",
    }  # fmt: skip
    for each in plans:
        assert each["data"] * each["tensor"] * len(each["stages"]) == 4
        assert [block for low, high in each["stages"] for block in range(low, high)] == [0, 1, 2, 3]
        assert each["peak_bytes"] <= 60 * MIB
    steps = [each["step_ms"] for each in plans]
    assert steps == sorted(steps)
    assert document["bound_ms"] == pytest.approx(1e3 * 4 * 0.03 / 4)
    assert document["gap"] == pytest.approx(1 - document["bound_ms"] / steps[0])


def test_codecs_for_slow_links(folder: Path, profile: Profile) -> None:
    (folder / "cluster.yaml").write_text(
        CLUSTER.replace("ranks_per_node: 2", "ranks_per_node: 1").replace("rate: 1Gbit/s", "rate: 1Mbit/s")
    )
    words = ("--codec", "bf16", "--codec", "{codec: topk, ratio: 0.1}", "-o", folder / "plan.json")
    answer = plan(folder, *words)
    assert answer.returncode == 0, answer.stderr
    assert "to the next one with {'codec': 'topk', 'ratio': 0.1}" in answer.stdout
    (codec,) = load_plan(folder / "plan.json", profile).codecs.values()
    assert codec == {"codec": "topk", "ratio": 0.1}
    answer = plan(folder, "--codec", "int5")
    assert "--codec" in answer.stderr
    assert "compress.codec: unknown codec 'int5'" in answer.stderr
    assert "codec:1: document: not valid YAML" in plan(folder, "--codec", "{codec").stderr


def test_what_is_printed_and_written(folder: Path, profile: Profile) -> None:
    answer = plan(folder, "-o", folder / "plan.json", "--report", folder / "plan.html", "--ranks", 2)
    assert answer.returncode == 0, answer.stderr
    document = json.loads(plan(folder, "--ranks", 2, "--json").stdout)
    best = document["plans"][0]
    origin = (
        "2 ranks, costs from built-in tables, for the links of cluster.yaml, assumed to be those measured"
    )
    assert answer.stdout.startswith(f"{origin}\n")
    assert document["origin"] == origin
    assert f"step {best['step_ms']:.1f} ms" in answer.stdout
    assert "bound" in answer.stdout
    assert "stage 0:" in answer.stdout
    assert str(folder / "plan.json") in answer.stdout + answer.stderr
    proved = prove(load_plan(folder / "plan.json", profile))
    assert (proved.plan.ranks, proved.plan.micro_batches) == (2, best["micro_batches"])
    page = (folder / "plan.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("<rect") == sum(len(run.ranks) for run in proved.runs)
    assert ("<td>batch in 2</td>" in page) == (best["data"] == 2)


def test_what_keeps_a_batch_whole_is_named(folder: Path) -> None:
    one, *more = [layer(number) for number in range(4)]
    chain([one.model_copy(update={"axes": {}}), *more]).save(folder / "profile.json")
    answer = plan(folder)
    assert answer.returncode == 0, answer.stderr
    assert f"no data parallelism or micro-batches: {one.name} cannot be cut along `batch`" in answer.stdout


def test_the_best_plan_for_torchs_engines_or_why_not(folder: Path) -> None:
    alone = [layer(number, items=1) for number in range(2)]  # no batch to cut
    chain(alone, items=1).save(folder / "profile.json")
    answer = plan(folder, "--ranks", 2, "--emit", folder / "torch.json")
    assert answer.returncode == 2
    assert "--emit: the best plan: model: expected the model" in answer.stderr
    blocks = [layer(number, heads=0, saved=8 * MIB) for number in range(4)]
    chain(blocks).save(folder / "profile.json")
    answer = plan(folder, "--ranks", 2, "--emit", folder / "torch.json", "-o", folder / "plan.json")
    assert answer.returncode == 0, answer.stderr
    assert str(folder / "torch.json") in answer.stdout + answer.stderr
    assert TorchPlan.load(folder / "torch.json") == emit(load_plan(folder / "plan.json", chain(blocks)))


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["--memory", "2MB"], ["--memory", "MiB"]),
        (["--memory", "much"], ["--memory", "64KiB"]),
        (["--memory", "1MiB"], ["nearest plan needs", "MiB more"]),
        (["--memory", "0"], ["MiB more"]),
        (["--what-if", "nic=1Gbit/s"], ["--what-if", "--parallel"]),
        (["--measured-on", "cluster.yaml"], ["--measured-on", "--parallel"]),
        (["step.json"], ["STEP", "--parallel"]),
        (["--ranks", "5"], ["ranks: 5", "has 4"]),
        (["--ranks", "0"], ["--ranks"]),
        (["-o", "no/such/plan.json"], ["-o", "no/such/plan.json"]),
        (["--report", "."], ["--report"]),
        (["--emit", "."], ["--emit"]),
    ],
)
def test_wrong_options(
    folder: Path, words: list[str], texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    answer = plan(folder, *words)
    assert answer.returncode == 2, answer
    assert answer.stdout == ""
    assert "Traceback" not in answer.stderr
    for text in texts:
        assert text in answer.stderr


def test_a_topology_is_needed(folder: Path) -> None:
    answer = plan(folder, topology=False)
    assert answer.returncode == 2
    assert "--topology" in answer.stderr
    answer = mcr_plus("plan", "--memory", "2GiB")
    assert answer.returncode == 2
    assert "--parallel" in answer.stderr


def test_links_without_rates_and_files_that_are_none(folder: Path) -> None:
    (folder / "cluster.yaml").write_text("nodes: 2\nranks_per_node: 2\n")
    (folder / "none.yaml").write_text("version: 1\nbackends: [local]\n")
    answer = plan(folder, "--config", folder / "none.yaml")
    assert answer.returncode != 0
    assert "link" in answer.stderr
    assert "no rate of inside, nic" in " ".join(answer.stderr.replace("│", "").split())
    assert "Traceback" not in answer.stderr
    for name, text in (("profile.json", "{"), ("cluster.yaml", "nodes: -1\n")):
        (folder / name).write_text(text)
        answer = plan(folder)
        assert answer.returncode == 2, answer
        assert name in answer.stderr
