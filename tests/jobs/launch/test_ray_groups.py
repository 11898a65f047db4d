"""Backend `MCR` of Ray's collective groups: actors on one node, and on two nodes in namespaces."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hosts import entered
from jobs.launch import ray_groups_program
from jobs.launch.ray_groups_program import SIZE, values
from two_hosts import TwoHosts, why_not

LIMIT_S: Final = 180.0
PORT: Final = 6379
TOKEN: Final = secrets.token_hex(32)  # of the test's own nodes and drivers, whatever the user's file has
HOSTS: Final = why_not(mpi=False)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (make test-launchers installs it)"
)


def environment(**more: str) -> dict[str, str]:
    paths = [str(Path(ray_groups_program.__file__).parent), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    common = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    return {**os.environ, **common, **more}


def done(words: list[str], variables: dict[str, str]) -> None:
    """Run a program; its output is the message if it fails."""
    ended = subprocess.run(
        words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-6000:]


def on_two_nodes(folder: Path) -> None:
    """Run the program with two actors on the first node and one on the second."""
    ray = str(Path(sys.executable).parent / "ray")
    with TwoHosts(None) as hosts:
        place = f"{hosts.addresses[0]}:{PORT}"
        ways = [["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder / 'ray'}"],
                [f"--address={place}"]]  # fmt: skip
        nodes: list[subprocess.Popen[bytes]] = []
        try:
            for number, way in enumerate(ways):
                resources = json.dumps({"ab"[number]: SIZE})
                words = [ray, "start", "--block", "--num-cpus=3", f"--resources={resources}", *way]
                words += [f"--node-ip-address={hosts.addresses[number]}", "--disable-usage-stats"]
                with open(folder / f"node{number}", "w") as output:
                    line = entered(hosts.names[number], words)
                    variables = environment(
                        GLOO_SOCKET_IFNAME=hosts.links[number], MCR_SECRET="a secret of this test"
                    )
                    nodes.append(subprocess.Popen(line, env=variables, stdout=output, stderr=output))
            script = (
                "import sys, time, ray\n"
                "for _ in range(120):\n"
                "    try:\n"
                f"        ray.init(address={place!r})\n"
                "        if len([n for n in ray.nodes() if n['Alive']]) == 2: sys.exit()\n"
                "        ray.shutdown()\n"
                "    except ConnectionError: pass\n"
                "    time.sleep(0.5)\n"
                "sys.exit('no two nodes')\n"
            )
            done(entered(hosts.names[0], [sys.executable, "-c", script]), environment())
            program = [sys.executable, ray_groups_program.__file__, str(folder), place]
            done(entered(hosts.names[0], program), environment())
        finally:
            for node in nodes:
                node.terminate()
            for node in nodes:
                node.wait(60)


@pytest.fixture(scope="module", params=["one node", "two nodes"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the actors saw."""
    folder = tmp_path_factory.mktemp("ray")
    if request.param == "one node":
        done([sys.executable, ray_groups_program.__file__, str(folder)], environment())
    elif HOSTS is not None:
        pytest.skip(f"hosts: {HOSTS}")
    else:
        on_two_nodes(folder)
    found: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    found["where"] = request.param
    return found


@pytest.mark.long
@pytest.mark.parametrize(("name", "size"), [("default", SIZE), ("part", 2), ("again", SIZE)])
def test_operations_are_those_of_numpy(seen: dict[str, Any], name: str, size: int) -> None:
    """The second group has two members of the first one, in the other order; the third comes after both."""
    entered_as = {"default": "entered", "part": "entered part", "again": "entered again"}[name]
    assert seen[entered_as] == [""] * size

    def of(seed: int) -> list[np.ndarray[Any, Any]]:
        return [values(rank, seed) for rank in range(size)]

    for rank, got in enumerate(seen[name]):
        assert got["rank"] == rank
        for op, function in (("SUM", np.sum), ("PRODUCT", np.prod), ("MIN", np.min), ("MAX", np.max)):
            np.testing.assert_allclose(got[op], function(of(0), axis=0), rtol=1e-12)
        np.testing.assert_allclose(got["array"], np.sum(of(1), axis=0), rtol=1e-12)
        mine = np.sum(of(2), axis=0) if rank == size - 1 else values(rank, 2)
        np.testing.assert_allclose(got["reduce"], mine, rtol=1e-12)
        assert got["broadcast"] == values(1, 3).tolist()
        assert got["allgather"] == [each.tolist() for each in of(4)]
        np.testing.assert_allclose(got["reducescatter"], np.sum(of(10 + rank), axis=0), rtol=1e-12)
        assert got.get("recv") == (values(0, 5).tolist() if rank == size - 1 else None)
        assert "gloo" in got["backends"]


@pytest.mark.long
def test_mistakes_are_errors(seen: dict[str, Any]) -> None:
    for of_type, of_name, of_shape, of_dtype in seen["mistakes"]:
        assert of_type.startswith("RuntimeError: Unrecognized tensor type")  # Ray's
        assert "no such group" in of_name
        assert of_name.startswith("RuntimeError")
        assert of_shape.startswith("InvalidArgument")
        assert "dtype" in of_dtype


@pytest.mark.long
def test_a_group_across_two_jobs_is_refused(seen: dict[str, Any]) -> None:
    """The jobs began with groups of the same name."""
    assert seen["entered apart"] == seen["entered last"] == [""] * SIZE
    for error in seen["entered across"]:
        assert "Unsupported: collective group 'across': a process has one job of mcr_plus" in error


@pytest.mark.long
def test_a_dead_actor_is_named(seen: dict[str, Any]) -> None:
    """In the last group, the actor of rank 1 dies."""
    *others, dead = seen["lost"]
    assert dead == "ActorDiedError"
    for error in others:
        assert error.startswith("PeerLost")
        assert "rank 1" in error


def test_another_ray_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from mcr_plus.engines import ray as ours
    from mcr_plus.errors import Unsupported

    monkeypatch.setattr(ours, "_METHODS", ours._METHODS | {"alltoall"})
    monkeypatch.setattr(ours._ray, "__version__", "9.9.9")
    with pytest.raises(Unsupported, match=r"Ray 9\.9\.9 .*tested with Ray 2\.60"):
        ours._base()
