"""How long ranks that train wait for a newcomer: with the state sent beforehand, and without.

Two ranks train; a third, which was killed and started again, joins them. `one host`: all on one. `two hosts`:
the newcomer is on another one, at the other end of a link (network namespaces; needs root and iproute2).
The models:

    dense      all parameters change in each step, with AdamW
    adapters   nearly all parameters are frozen
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import harness
import torch
import typer
from harness import HARDWARE, Dated, Hardware
from two_hosts import TwoHosts, why_not

import mcr_plus as mcr
from mcr_plus.communicator import transfer
from mcr_plus.core.c10d import TCPStore
from mcr_plus.kernels import delta
from mcr_plus.kernels.digest import digest

MODELS: Final = ("dense", "adapters")
WIDTH: Final = 384
LAYERS: Final = 4
_DIES: Final = 3  # in this step
_BEFORE: Final = 5  # steps before rank 2 is started again
_AFTER: Final = 3  # steps with it
_LIMIT: Final = 240.0
_PORT: Final = 29511


class Adapted(torch.nn.Module):
    """A frozen layer with a small trained one beside it."""

    def __init__(self, frozen: torch.nn.Module, width: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(requires_grad=False)
        self.down = torch.nn.Linear(width, 8)
        self.up = torch.nn.Linear(8, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of both."""
        return self.frozen(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def made(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model of about 85 MB with the state of its optimizer."""
    torch.manual_seed(0)
    width = WIDTH if kind == "dense" else 640
    layers = [
        torch.nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(LAYERS)
    ]
    if kind == "dense":
        model = torch.nn.Sequential(*layers)
    else:
        model = torch.nn.Sequential(*(Adapted(layer, width) for layer in layers))
    trained = [each for each in model.parameters() if each.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-4)


def rank(slot: int, folder: Path, kind: str, precopy: bool, tokens: int) -> None:
    """Train; rank 0 notes its steps."""
    torch.set_num_threads(1)
    mcr.init({"version": 1, "pipeline": [{"select": {}}, {"dispatch": {"timeout": "120s"}}]})
    model, optimizer = made(kind)
    mcr.wrap(model, optimizer)
    sent: list[int] = []
    broadcast = transfer.broadcast_tensors

    def counted(tensors: Any, *others: Any, tag: str | None = None) -> None:
        sent.extend(each.nbytes for each in tensors if tag == transfer.STATE)
        broadcast(tensors, *others, tag=tag)

    setattr(transfer, "broadcast_tensors", counted)  # noqa: B010 - mypy takes an assignment for a mistake
    is_first = os.environ["MCR_RESTARTS"] == "0"
    if not is_first:
        (folder / "asks").write_text(str(time.monotonic()))
    width = next(model.parameters()).shape[-1]
    notes: list[tuple[float, float, int]] = []
    together = 0
    for step in mcr.elastic(model, optimizer, precopy=precopy):
        with step:
            began, size = time.monotonic(), mcr.get_world_size()
            if slot == 2 and is_first and step.number == _DIES:
                os.kill(os.getpid(), signal.SIGKILL)
            generator = torch.Generator().manual_seed(1000 * slot + step.number)
            optimizer.zero_grad()
            model(torch.randn(tokens // 64, 64, width, generator=generator)).square().mean().backward()
            optimizer.step()
            together = together + 1 if size == 3 and step.number > _DIES else 0
            notes.append((began, time.monotonic(), size))
            if size == 2 and len(notes) == _DIES + _BEFORE:
                (folder / f"goes.{slot}").touch()
        if together == _AFTER:
            break
    state = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    state += sum(
        value.nbytes for each in optimizer.state.values() for value in each.values() if value.numel() > 1
    )
    (folder / f"told.{slot}").write_text(json.dumps({"notes": notes, "sent": sum(sent), "state": state}))
    mcr.finalize()


def differences(kind: str) -> list[str]:
    """The share of the state that a step changes, and the bytes of that in the codec `delta`."""
    model, optimizer = made(kind)
    width, states = next(model.parameters()).shape[-1], list[torch.Tensor]()
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 64, width)).square().mean().backward()
        optimizer.step()
        moments = (value for state in optimizer.state.values() for value in state.values())
        both = (*model.parameters(), *moments)
        states.append(torch.cat([each.detach().float().reshape(-1) for each in both]))
    before, flat = states[-2:]
    wire = torch.empty(delta.most_nbytes(flat.numel(), 4), dtype=torch.uint8)
    nbytes = delta.encode(flat, before, wire, (0, 1), digest(before))
    share = (flat.view(torch.int32) != before.view(torch.int32)).double().mean().item()
    return [kind, f"{flat.nbytes / 1e6:.0f}", f"{share:.3f}", f"{nbytes / flat.nbytes:.3f}"]


def started(
    slot: int, restarts: int, environment: dict[str, str], hosts: TwoHosts | None, *arguments: Any
) -> int:
    """Fork a rank; returns its process id."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        if hosts is not None:
            hosts.enter(int(slot == 2))
        os.environ.update(environment, RANK=str(slot), LOCAL_RANK=str(slot), MCR_RESTARTS=str(restarts))
        rank(slot, *arguments)
        status = 0
    except BaseException as error:
        print(f"rank {slot}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


@contextmanager
def store(address: str, hosts: TwoHosts | None) -> Iterator[None]:
    """The store of a launcher, in a process of its own."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        if hosts is not None:
            hosts.enter(0)
        kept = TCPStore(address, _PORT, None, is_master=True, wait_for_workers=False)
        os.write(writing, b".")
        signal.pause()
        del kept
    os.read(reading, 1)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


def joined(kind: str, precopy: bool, tokens: int, hosts: TwoHosts | None) -> dict[str, float]:
    """One newcomer: seconds of the pause, of steps before and while it gets the state, and megabytes."""
    address = "127.0.0.1" if hosts is None else hosts.addresses[0]
    environment = {
        "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": address, "MASTER_PORT": str(_PORT),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "MCR_SECRET": secrets.token_hex(16), "MCR_MIN_RANKS": "2",
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="mcr-newcomer-") as name, store(address, hosts):
        folder = Path(name)
        arguments = (folder, kind, precopy, tokens)
        pids = [started(slot, 0, environment, hosts, *arguments) for slot in range(3)]
        ends = time.monotonic() + _LIMIT
        while not (folder / "goes.0").exists():
            if time.monotonic() > ends:
                raise SystemExit("the two ranks do not train")
            time.sleep(0.01)
        os.waitpid(pids[2], 0)
        pids[2] = started(2, 1, environment, hosts, *arguments)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if statuses != [0, 0, 0]:
            raise SystemExit(f"statuses {statuses}")
        told = json.loads((folder / "told.0").read_text())
        asked = float((folder / "asks").read_text())
        sent = json.loads((folder / "told.2").read_text())["sent"]
    notes = told["notes"]
    last = max(n for n, (_, _, size) in enumerate(notes) if size == 2)
    before = [ended - began for began, ended, size in notes if size == 2 and ended < asked]
    while_given = [ended - began for began, ended, size in notes if size == 2 and began >= asked]
    return {
        "pause": notes[last + 1][0] - notes[last][1],
        "waits": notes[last][1] - asked,
        "before": median(before[1:] or before),
        "beside": median(while_given) if while_given else float("nan"),
        "sent": sent / 1e6,
        "state": told["state"] / 1e6,
    }


def main(
    rounds: harness.Rounds = 3,
    tokens: Annotated[int, typer.Option(min=64, help="Of a rank in a step.")] = 512,
    rates: Annotated[list[str] | None, typer.Option("--rate", help="Of links between two hosts.")] = None,
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    """Measure and write the report."""
    places: list[str | None] = [None, *(["1gbit"] if rates is None else rates)]
    if (reason := why_not(mpi=False)) is not None:
        places = [None]
        print(f"left out, two hosts: {reason}")
    rows = []
    for rate in places:
        with TwoHosts(rate) if rate is not None else nullcontext() as hosts:
            for kind in MODELS:
                found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
                for _ in range(rounds):
                    for precopy in (False, True):
                        found[precopy].append(joined(kind, precopy, tokens, hosts))
                for precopy, several in found.items():
                    middle = {key: median(each[key] for each in several) for key in several[0]}
                    rows.append([
                        "one host" if rate is None else f"two hosts, {rate}",
                        kind,
                        "beforehand" if precopy else "in the pause",
                        *(f"{middle[key]:.0f}" for key in ("state", "sent")),
                        f"{middle['pause']:.2f}",
                        f"{min(each['pause'] for each in several):.2f}",
                        f"{max(each['pause'] for each in several):.2f}",
                        *(f"{middle[key]:.2f}" for key in ("before", "beside", "waits")),
                    ])  # fmt: skip
    head = ["where", "model", "state sent", "state, MB", "in the pause, MB", "pause, s", "least", "most",
            "step before, s", "step beside, s", "until the pause, s"]  # fmt: skip
    harness.show(head, rows)
    changes = ["model", "state, MB", "share of values changed", "bytes in `delta` / of the state"]
    of_steps = [differences(kind) for kind in MODELS]
    harness.show(changes, of_steps)
    note = (
        "a pause is the time between two steps of rank 0, of which the second one has the newcomer; medians. "
        "`step beside`: while the newcomer waits and is given the state"
    )
    parts = [harness.markdown(head, rows), "### What one step changes", harness.markdown(changes, of_steps)]
    text = harness.page("State for newcomers", harness.command(), note, *parts)
    harness.write(text, output, f"newcomer_{hardware}")


run = harness.program(main)

if __name__ == "__main__":
    run()
