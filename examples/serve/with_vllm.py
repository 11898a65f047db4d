"""Serve a Llama over HTTP by vLLM, while a trainer beside it changes its weights.

    python examples/serve/with_vllm.py

Starts `llama.py`, which trains and pushes, and `vllm serve`, which follows it. The same question is asked
again and again; its answer changes with the weights alone, as tokens are not drawn at random.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).parent.parent / "common"))  # what the examples share

import command_line
import typer

HERE = Path(__file__).parent
PROMPT = "The value of "


def served(folder: Path, invitation: Path, port: int, degree: int) -> list[str]:
    """The command of the server."""
    transfer, follows = {"backend": "mcr"}, {"mcr_plus": {"invitation": str(invitation)}}
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "policy"),
        *(
            "--enforce-eager",
            "--uvicorn-log-level",
            "warning",
            "--max-model-len",
            "128",
            "--tensor-parallel-size",
            str(degree),
        ),
        *("--weight-transfer-config", json.dumps(transfer), "--additional-config", json.dumps(follows)),
    ]


def answer(port: int, length: int) -> str | None:
    """Ask the server; None if it does not answer yet."""
    question = {
        "model": "policy",
        "prompt": PROMPT,
        "max_tokens": length,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(question).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            text: str = json.load(reply)["choices"][0]["text"]
            return text
    except urllib.error.URLError:
        return None


def wait_for(ready: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until the trainer has written the checkpoint."""
    while not ready.exists():
        if process.poll() is not None:
            raise SystemExit(f"the trainer has ended with status {process.returncode}")
        time.sleep(0.2)


def talk(
    port: int, length: int, trainer: subprocess.Popen[bytes], server: subprocess.Popen[bytes]
) -> Sequence[str]:
    """Ask until the trainer has ended, and once more; returns the different answers."""
    found: list[str] = []
    is_last = False
    while True:
        said = answer(port, length)
        if said is not None and said not in found[-1:]:
            found.append(said)
            print(f"server   {PROMPT!r} → {said!r}", flush=True)
        if is_last and said is not None:
            return found
        if server.poll() is not None:
            raise SystemExit(f"vLLM has ended with status {server.returncode}")
        is_last = trainer.poll() is not None and said is not None
        time.sleep(1.0)


def main(
    steps: Annotated[int, typer.Option(min=1, help="of training")] = 300,
    every: Annotated[int, typer.Option(min=1, help="steps from push to push")] = 50,
    degree: Annotated[int, typer.Option(min=1, help="tensor parallel degree of the server")] = 1,
    length: Annotated[int, typer.Option(min=1, max=100, help="tokens of an answer")] = 40,
) -> None:
    """Train, serve and ask."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    names = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environ = {"VLLM_LOGGING_LEVEL": "ERROR", **names, **os.environ, "VLLM_PLUGINS": "mcr_plus"}
    with tempfile.TemporaryDirectory() as folder:
        invitation, checkpoint = Path(folder, "policy.sync"), Path(folder, "model")
        trains = [
            *(
                sys.executable,
                "-m",
                "mcr_plus",
                "run",
                "-n",
                "1",
                str(HERE / "llama.py"),
                str(checkpoint),
                str(invitation),
            )
        ]
        options = ("--steps", steps, "--every", every, "--degree", degree, "--servers", degree)
        trainer = subprocess.Popen([*trains, *map(str, options)], env=environ)
        try:
            wait_for(checkpoint / "tokenizer_config.json", trainer)
            server = subprocess.Popen(served(checkpoint, invitation, port, degree), env=environ)
            try:
                talk(port, length, trainer, server)
            finally:
                server.terminate()
                server.wait(60)
        finally:
            trainer.terminate()
            trainer.wait(60)


if __name__ == "__main__":
    command_line.run(main)
