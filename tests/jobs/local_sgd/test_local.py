"""`mcr.local` on real ranks: equal to the simulation, with every codec, restored, and after losses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs.local_sgd import local_elastic
from jobs.local_sgd import local_jobs as jobs
from local_oracle import Sgd, simulate
from ranks import run_ranks

from mcr_plus.rendezvous.mpi_launcher import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")
NAMES = {1: ["abcde"], 3: ["a", "b", "cde"], 4: ["a", "b", "c", "de"]}


@pytest.mark.parametrize(
    ("ranks", "backend", "dispatch"),
    [
        (2, "gloo", {}),
        (3, "gloo", {}),
        pytest.param(3, "mpi", {}, marks=needs_mpi),
        pytest.param(2, "mpi", {"progress": "thread"}, marks=needs_mpi),
    ],
)
def test_ranks_do_what_the_simulation_does(ranks: int, backend: str, dispatch: dict[str, Any]) -> None:
    results = [each.value for each in run_ranks(jobs.courses, ranks, args=[backend, dispatch])]
    for course, (settings, rate, steps) in enumerate(jobs.COURSES):
        wanted = simulate(
            ranks,
            steps,
            settings["every"],
            NAMES[settings.get("fragments", 1)],
            delay=settings.get("delay", 0),
            mix=settings.get("mix", 1.0),
            outer=None if rate is None else Sgd(rate),
            warmup=settings.get("warmup", 0),
        )
        for step in range(steps):
            for rank in range(ranks):
                parameters, outer = results[rank][course][step]
                np.testing.assert_allclose(parameters, wanted.local[step][rank], rtol=1e-11, atol=1e-13)
                assert step < settings.get("warmup", 0) or outer == results[0][course][step][1]
            if step >= settings.get("warmup", 0):
                outer = results[0][course][step][1]
                np.testing.assert_allclose(outer, wanted.outer[step], rtol=1e-11, atol=1e-13)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_codec_leaves_replicas_with_the_same_bits(ranks: int) -> None:
    results = [each.value for each in run_ranks(jobs.codecs, ranks, timeout=240)]
    carried = 0
    for name, first in results[0].items():
        assert all(result[name] == first for result in results), name  # ranks compared all bits as well
        if "refused" in first:
            assert any(other in name for other in ("powersgd", "ef21", "delta")), first
            continue
        carried += 1
        assert first["finite"], name
        assert name.split()[0] in "".join(first["codecs"]), (name, first)
    assert carried >= 15


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_last_of_training_is_sent_by_the_codec_or_exactly(ranks: int) -> None:
    results = [each.value for each in run_ranks(jobs.endings, ranks, timeout=240)]
    for name in results[0]:
        found = [result[name] for result in results]
        assert all(each["later"] == found[0]["later"] for each in found), name
    assert results[0]["uneven"]["steps"] > results[1]["uneven"]["steps"]
    dense = results[0]["float32"]["bytes"]
    for name in (*jobs.ENDINGS, *(f"{way} exact" for way in jobs.EXACT)):
        found = [result[name] for result in results]
        first = found[0]
        assert all(each["ends"] == first["ends"] and each["equal"] for each in found), name
        assert first["rounds"] == 1
        mean = np.mean([each["own"] for each in found], axis=0)
        if name.endswith("exact") or name == "float32":
            assert first["codecs"] == ["None"], name
            assert first["bytes"] == dense
            np.testing.assert_allclose(first["ends"], mean, rtol=1e-6, atol=1e-7)
            assert first["after"] == first["before"]
            continue
        assert first["codecs"] == [jobs.ENDINGS[name]["codec"] if "int8" not in name else "int8_block"]
        assert first["bytes"] < 0.7 * dense, name
        left = np.abs(np.subtract(first["ends"], mean)).max()
        assert 0 < left < np.abs(np.subtract(first["anchor"], mean)).max() + np.abs(first["before"]).max(), (
            name
        )
        if "feedback" in name and "int2" not in name:
            # Nothing is lost: values that are newly missing in the end wait to be sent.
            wanted = mean - first["before"] + np.array(first["after"])
            np.testing.assert_allclose(first["ends"], wanted, rtol=1e-5, atol=1e-6)
            assert any(first["after"])


def test_rules_choose_codecs_by_tag() -> None:
    for result in run_ranks(jobs.by_rule, 2):
        assert result.value["outer.0"] == ["None"]
        assert result.value["outer.1"] == ["int8_block"]


@pytest.mark.long
def test_a_rule_compresses_between_nodes_alone() -> None:
    found = [each.value for each in run_ranks(jobs.between_nodes, 4)]
    for rank, each in enumerate(found):
        sent = {(group, codec) for group, codec in each["sent"] if not group.startswith("world/across")}
        assert f"world/node{rank // 2}" in {group for group, _ in sent}
        assert {codec for _, codec in sent} == {None}
        across = {(group, codec) for group, codec in each["sent"] if group.startswith("world/across")}
        assert across == {(f"world/across{rank % 2}", "int8_block")}
        assert each["outer"] == found[0]["outer"]
    own = np.array([each["own"] for each in found])
    wanted = own.mean(0)  # outer SGD of the rate 1
    learned = np.abs(np.array(found[0]["before"]) - own).max()
    np.testing.assert_allclose(found[0]["outer"], wanted, rtol=0, atol=learned / 100)
    assert not np.array_equal(found[0]["outer"], wanted)


def test_what_is_refused() -> None:
    for result in run_ranks(jobs.refusals, 2):
        found = result.value
        assert "int9_block" in found["unknown"]
        assert "rate" in found["option"]
        assert "no codec" in found["no codec"]
        assert "powersgd is for matrices" in found["powersgd"]
        assert "one vector: expected a codec for that, such as int8_block" in found["powersgd"]
        assert "got 3" in found["number"]
        assert "rank 1 has other parameters" in found["other"] or "rank 0" in found["other"]
        assert "wrapped by mcr.wrap" in found["wrapped"]


@pytest.mark.long
def test_checkpoints_at_every_step_restore_the_same_run() -> None:
    assert all(result.value for result in run_ranks(jobs.restored, 2))


@pytest.mark.long
def test_residuals_are_sent_later_unless_they_decay() -> None:
    results = [each.value for each in run_ranks(jobs.feedback, 2, timeout=240)]
    for found in results:
        # Unsent values are sent later, once, whatever `mix`; without feedback, or with decay, never.
        for name, distance in found["distances"].items():
            if name.endswith("True"):
                assert distance < 1e-3, found["distances"]
            else:
                assert distance > 1e-2, found["distances"]
        assert found["kept"] == 1
        assert found["numbers"] == [12, 13]
        assert found["second"], "a second instance does not do what the first has done"
        assert found["held"] == [True] * 4  # of two fragments of the first, which one rank still has, too
        assert found["restored"]
        assert found["again"]
        assert found["ends"] == results[0]["ends"]


def survivors(target: Any, ranks: int, lost: list[int], args: list[Any]) -> list[dict[str, Any]]:
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    results = run_ranks(target, ranks, via="torch", check=False, env=env, args=args)
    assert [each.rank for each in results if each.returncode == -9] == lost, [each.stderr for each in results]
    found = [each.value for each in results if each.rank not in lost]
    assert None not in found, [each.stderr for each in results]
    return found


INT4 = {"codec": "int4_block", "error_feedback": True}


@pytest.mark.short("1-9-3")
@pytest.mark.parametrize(
    ("victim", "at", "delay", "compress"),
    [(1, 7, 0, None), (2, 9, 3, None), (0, 6, 3, None), (1, 9, 3, INT4)],
)
def test_a_rank_that_is_killed_costs_at_most_a_round(
    victim: int, at: int, delay: int, compress: dict[str, Any] | None
) -> None:
    first, second = survivors(jobs.after_a_death, 3, [victim], [victim, at, delay, compress])
    for name in ("values", "outer", "steps", "rounds"):
        assert first[name] == second[name], name
    assert (first["losses"], first["size"], first["steps"]) == (1, 2, 20)
    # Undisturbed, fragment 0 would be sent at steps 2, 6, …, 18 and at the end, fragment 1 at 4, 8, …, 20.
    assert all(missing in (0, 1) for missing in np.subtract([6, 5], first["rounds"])), first["rounds"]


@pytest.mark.long
def test_a_newcomer_begins_with_the_outer_state(tmp_path: Path) -> None:
    found = survivors(jobs.with_a_newcomer, 3, [], [str(tmp_path)])
    trained, new = found[0], found[2]
    assert found[0]["before"] == found[1]["before"] != new["before"]
    for each in found:
        assert each["begun"]["outer"] == trained["begun"]["outer"]
        assert (each["begun"]["steps"], each["begun"]["position"], each["size"]) == (10, 2, 3)
        assert each["values"] == trained["values"]
    assert [each["begun"]["tags"] for each in found] == [["outer.1.0", "outer.1.1", "outer.2.0"]] * 3
    # Steps 11 to 17: the third window of weighted means ends with step 12; a newcomer has made two of its
    # steps.
    for at, steps in ((1, [4, 4, 2]), (5, [4, 4, 4])):
        shares = np.array(steps) * jobs.TOKENS
        moved = np.array([each["begun"]["moved"][at] for each in found])
        wanted = shares @ moved / shares.sum()
        for each in found:
            np.testing.assert_allclose(each["begun"]["means"][at], wanted, rtol=1e-11, atol=1e-13)
    assert new["begun"]["values"] == new["begun"]["outer"]
    assert trained["begun"]["values"] != trained["begun"]["outer"]


@pytest.mark.long
def test_a_rank_that_is_started_again_joins_an_elastic_loop(tmp_path: Path) -> None:
    words = ["run", "-n", "3", "--min-ranks", "2", "--restart-failed", "2"]
    command = [sys.executable, "-m", "mcr_plus.cli.main", *words, str(local_elastic.__file__), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    ends = [json.loads((tmp_path / f"end.{rank}").read_text()) for rank in range(3)]
    assert {end["steps"] for end in ends} == {200}
    assert all(end["values"] == ends[0]["values"] == end["outer"] for end in ends)
    assert {2, 3} == set(ends[0]["sizes"])
    assert set(ends[1]["sizes"]) == {3}
