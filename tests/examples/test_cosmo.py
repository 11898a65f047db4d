"""The network that is split over space: its fields, its slabs, and runs compared with one process."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from example_runs import alone, launch
from fields import SPREAD, Fields
from libraries import JobError
from network import spread

from mcr_plus.rendezvous.mpi_launcher import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")
TINY = ("--size", 8, "--levels", 2, "--channels", 2, "--batch", 2)


def test_fields_are_standardized_and_smoother_with_a_larger_index() -> None:
    fields, targets = Fields(16, 0).draw(0, 0, 12)
    assert fields.shape == (12, 1, 16, 16, 16)
    assert fields.dtype == targets.dtype == torch.float32
    torch.testing.assert_close(fields.mean((1, 2, 3, 4)), torch.zeros(12), atol=1e-5, rtol=0)
    torch.testing.assert_close(fields.std((1, 2, 3, 4)), torch.ones(12), atol=1e-3, rtol=0)
    steps = (fields - fields.roll(1, 2)).square().mean((1, 2, 3, 4))
    order = targets[:, 0].argsort()
    assert torch.corrcoef(torch.stack([steps, targets[:, 0]]))[0, 1] < -0.9
    assert steps[order[0]] > steps[order[-1]]


def test_fields_depend_on_seed_stream_and_step_alone() -> None:
    first, targets = Fields(8, 0).draw(0, 3, 2)
    again = Fields(8, 0).draw(0, 3, 2)
    assert torch.equal(first, again[0])
    assert torch.equal(targets, again[1])
    for seed, stream, step in ((1, 0, 3), (0, 1, 3), (0, 0, 4)):
        assert not torch.equal(first, Fields(8, seed).draw(stream, step, 2)[0])


def test_targets_have_mean_zero_and_the_error_of_the_mean_is_their_spread() -> None:
    _, targets = Fields(2, 0).draw(0, 0, 4000)
    assert abs(targets.mean().item()) < 0.05
    assert abs(targets.std().item() - 1) < 0.03
    assert abs(SPREAD - 0.577) < 0.001


def test_slabs_are_multiples_of_the_poolings() -> None:
    layout = spread(32, (3, 1, 1), 8)
    assert [layout.locals[rank] for rank in range(3)] == [(8, 32, 32), (8, 32, 32), (16, 32, 32)]
    mesh = spread(8, (2, 2, 1), 4)
    assert set(mesh.locals.values()) == {(4, 4, 8)}
    mesh.check_source()
    for size, parts, unit in ((32, (5, 1, 1), 8), (12, (1, 1, 1), 8)):
        with pytest.raises(JobError, match="multiples of 8"):
            spread(size, parts, unit)


@pytest.mark.short("2")
@needs_mpi
@pytest.mark.parametrize(("ranks", "more"), [(2, ()), (4, ("--mesh", "2,1,2"))])
def test_ranks_together_are_one_process(tmp_path: Path, ranks: int, more: tuple[str, ...]) -> None:
    path = tmp_path / "out.json"
    done = launch("cosmo", *TINY, "--check", "--steps", 3, "--json", path, *more, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as in one process" in done.stdout
    result = json.loads(path.read_text())
    assert result["difference"] < 1e-9
    assert result["halo_bytes"] > 0
    assert {row["tag"] for row in result["communication"]} >= {"halo", "gradients", "mean"}


@pytest.mark.long
@needs_mpi
def test_two_ranks_beat_the_mean_prediction(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    words = ("--size", 16, "--levels", 1, "--steps", 60, "--lr", 0.01)
    done = launch("cosmo", *words, "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "always predicting the mean: 0.577" in done.stdout
    result = json.loads(path.read_text())
    assert result["held_out_error"] < 0.5 * result["error_of_the_mean"]
    losses = result["train_loss"]["steps"]
    assert all(first != second for first, second in pairwise(losses))


def test_wrong_arguments_are_a_line() -> None:
    for words, error in (
        (("--size", 12), "a volume of 12³ has no 1 slabs of sizes that are multiples of 8"),
        (("--mesh", "2,1"), "--mesh 2,1: expected three numbers, such as 1,1,1, for 1 ranks"),
    ):
        done = alone("cosmo", *words)
        assert done.returncode == 1
        assert done.stderr.endswith(f"error: {error}\n")
        assert "Traceback" not in done.stderr
