"""The transformer that some ranks train and others serve: their layouts, and runs with updates."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from example_runs import EXAMPLES, TINY, alone, launch
from ranks import nursery
from serving import layout_of, share_of, whole_shapes
from transformer import Shape

from mcr_plus.rendezvous.mpi_launcher import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")
SHAPE = Shape(layers=2, hidden=24, heads=4, sequence=10)


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_layouts_of_servers_are_the_shares_of_their_layers(servers: int) -> None:
    ranks = list(range(3, 3 + servers))
    for name, shape in whole_shapes(SHAPE).items():
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        layout = layout_of(name, shape, ranks)
        for number, rank in enumerate(ranks):
            found: list[int] = []
            for piece in layout.pieces(rank).tolist():
                lows, highs = layout.held.lows[piece].tolist(), layout.held.highs[piece].tolist()
                found += whole[tuple(map(slice, lows, highs))].flatten().tolist()
            assert found == share_of(name, whole, number, servers).flatten().tolist(), name


@pytest.mark.short("3")
@needs_mpi
@pytest.mark.parametrize(
    ("ranks", "more"), [(4, ("--double", "--compare", "--rounds", 1)), (3, ("--servers", 2))]
)
def test_servers_have_the_weights_of_the_trainers(tmp_path: Path, ranks: int, more: tuple[str, ...]) -> None:
    path = tmp_path / "out.json"
    done = launch("serve", *TINY, "--every", 2, "--length", 5, "--json", path, *more, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "check" in done.stdout
    assert "as on the ranks that train" in done.stdout
    result = json.loads(path.read_text())
    losses = result["losses"]
    assert len(losses["servers"]) == 3
    assert losses["servers"][0] > losses["servers"][-1]
    assert losses["servers"] == pytest.approx(losses["trainers"], rel=1e-9 if "--double" in more else 1e-4)
    assert all(text.startswith("The value of ") for text in result["texts"])
    assert len(result["update_seconds"]) == (2 if "--compare" in more else 0)
    assert set(result["needed_bytes"]) == {str(rank) for rank in result["servers"]}


@contextmanager
def program(name: str, *words: object) -> Iterator[subprocess.Popen[str]]:
    """A program of the example; it is killed at the end."""
    command = [nursery().python, str(EXAMPLES / "serve" / name), "--hidden", "32", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=nursery().environ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.long
def test_a_server_outside_the_job_is_killed_and_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "policy.sync"

    def lines(server: subprocess.Popen[str], count: int) -> list[str]:
        assert server.stdout is not None
        return [server.stdout.readline() for _ in range(count)]

    with program("sync.py", "--invite", file, "--steps", 10**6) as trainer:
        for _ in range(2):
            with program("server.py", file, "--length", 2) as server:
                assert all(line.startswith("server  version ") for line in lines(server, 2))
        with program("server.py", file, "--length", 2) as server:
            assert "The value of " in lines(server, 1)[0]
            trainer.kill()
            rest, _ = server.communicate(timeout=120)
            assert server.returncode == 0
            assert "server  ends: sync 'policy' of '" in rest


def test_wrong_arguments_are_a_line() -> None:
    done = alone("serve")
    assert done.returncode == 1
    assert done.stderr.endswith(
        "error: --servers 1: expected at least one more rank, which trains; got 1 in all\n"
    )
    assert "Traceback" not in done.stderr
