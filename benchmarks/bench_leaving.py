"""Ranks that leave on notice, and copies of shards on buddies.

    python benchmarks/bench_leaving.py --notices 30 --sharded-notices 6 --rounds 3

*Notices*: jobs of four ranks (`mcr-plus run --min-ranks 1`), of which three are told to leave one after
another by SIGTERM; the last one counts its steps. A pause is the time between two steps of that rank where
ranks change. *Copies*: bytes in the codec `delta` / bytes of a plain copy, after so many steps of AdamW;
beside them the gradients of these steps, from which a buddy could repeat them. *Cost*: steps of an FSDP2
model on two hosts (network namespaces, needs root), with buddies and without, in turns; the ratio is the
median of those of a turn.
The report goes to benchmarks/results/leaving_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import harness
import torch
import torch.distributed as dist
import typer
from harness import HARDWARE, Dated, Hardware
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from two_hosts import TwoHosts, why_not

import mcr_plus as mcr
from mcr_plus.elasticity import state_stream
from mcr_plus.kernels import delta
from mcr_plus.kernels.digest import digest

RANKS: Final = 4
_FIRST: Final = 4  # step in which the first rank is told
_APART: Final = 4  # steps between two notices
_STEPS: Final = _FIRST + _APART * RANKS
_JOB: Final = "MCR_BENCH_LEAVING"  # JSON for the ranks, in their environment


def layers(width: int, count: int) -> torch.nn.Sequential:
    """A model of `count` blocks."""
    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer
    return torch.nn.Sequential(*(block(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(count)))


# --- on ranks -------------------------------------------------------------------------------------------


def on_rank(job: dict[str, Any]) -> None:
    """Train as the job says; write times of steps and bytes of copies."""
    torch.set_num_threads(1)
    slot = int(os.environ["RANK"])
    Path(job["folder"], f"pid.{slot}").write_text(str(os.getpid()))
    sent: list[int] = []
    send = state_stream.send

    def counted(link: Any, message: state_stream.StateMessage) -> None:
        sent.append(message.nbytes)
        send(link, message)

    setattr(state_stream, "send", counted)  # noqa: B010 - mypy takes an assignment for a mistake
    leave = _FIRST + _APART * slot if job["leaves"] and slot < RANKS - 1 else -1
    notes: list[tuple[int, int, float, float]] = []
    loop = _sharded(job) if job["sharded"] else _replicated(job)
    try:
        for number, ranks, began, ended in loop:
            notes.append((number, ranks, began, ended))
            if number == leave:
                os.kill(os.getpid(), signal.SIGTERM)
    finally:
        path = Path(job["folder"], f"notes.{slot}")
        path.write_text(json.dumps({"notes": notes, "sent": sent}))


def _replicated(job: dict[str, Any]) -> Iterator[tuple[int, int, float, float]]:
    mcr.init({"version": 1, "elastic": job["elastic"]})
    model = layers(job["width"], job["blocks"])
    model, optimizer = mcr.wrap(model, torch.optim.AdamW(model.parameters()))
    for step in mcr.elastic(model, optimizer, steps=job["steps"]):
        with step:
            began, ranks = time.monotonic(), mcr.get_world_size()
            optimizer.zero_grad()
            model(torch.randn(job["batch"], 32, job["width"])).square().mean().backward()
            optimizer.step()
            yield step.number, ranks, began, time.monotonic()
    mcr.finalize()


def _sharded(job: dict[str, Any]) -> Iterator[tuple[int, int, float, float]]:
    config = Path(job["folder"], f"config.{os.environ['RANK']}")
    config.write_text(json.dumps({"version": 1, "elastic": job["elastic"]}))
    os.environ["MCR_CONFIG"] = str(config)
    dist.init_process_group("mcr")

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = layers(job["width"], job["blocks"])
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for each in (*model, model):
            fully_shard(each, mesh=mesh)
        return mcr.fsdp(model), torch.optim.AdamW(model.parameters())

    for step in mcr.elastic_sharded(build, steps=job["steps"]):
        with step:
            began, ranks = time.monotonic(), dist.get_world_size()
            step.optimizer.zero_grad()
            step.model(torch.randn(job["batch"], 32, job["width"])).square().mean().backward()
            step.optimizer.step()
            yield step.number, ranks, began, time.monotonic()
    dist.destroy_process_group()


# --- measurements ---------------------------------------------------------------------------------------


def pauses(sharded: bool, width: int) -> list[float]:
    """The pauses of one job of four ranks; ends the program if a step is lost or repeated."""
    with tempfile.TemporaryDirectory(prefix="mcr-leaving-") as folder:
        job = {"folder": folder, "sharded": sharded, "leaves": True, "elastic": {"notice": "sigterm"},
               "width": width, "blocks": 2, "batch": 2, "steps": _STEPS}  # fmt: skip
        line = [*harness.MCR_PLUS, "run", "-n", str(RANKS), "--min-ranks", "1", __file__]
        done = subprocess.run(
            line, env={**os.environ, _JOB: json.dumps(job)}, capture_output=True, text=True, check=False
        )
        notes = json.loads(Path(folder, f"notes.{RANKS - 1}").read_text())["notes"]
    if done.returncode != 0 or [number for number, *_ in notes] != list(range(_STEPS)):
        raise SystemExit(f"status {done.returncode}, steps {notes}\n{done.stdout}{done.stderr}")
    found = [after[2] - before[3] for before, after in pairwise(notes) if after[1] < before[1]]
    if len(found) != RANKS - 1:
        raise SystemExit(f"{len(found)} of {RANKS - 1} ranks have left\n{done.stdout}{done.stderr}")
    return found


def ratios(dtype: torch.dtype, apart: int) -> list[str]:
    """Bytes in `delta` / plain bytes of parameters, moments, all of them; and of a gradient."""
    model = layers(256, 2).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = torch.randn(8, 8, 64, 256).to(dtype)
    versions: list[dict[str, torch.Tensor]] = []
    for step in range(100 + apart):
        optimizer.zero_grad()
        (model(batches[step % 8]) - batches[(step + 1) % 8]).float().square().mean().backward()
        optimizer.step()
        if step in (99, 99 + apart):
            state = [optimizer.state[each] for each in model.parameters()]
            kinds = {
                "parameters": [each.detach() for each in model.parameters()],
                "exp_avg": [each["exp_avg"] for each in state],
                "exp_avg_sq": [each["exp_avg_sq"] for each in state],
                "gradient": [each.grad for each in model.parameters() if each.grad is not None],
            }
            versions.append({n: torch.cat([e.reshape(-1) for e in kind]) for n, kind in kinds.items()})
    before, after = versions
    sizes: dict[str, int] = {}
    for name, values in after.items():
        wire = torch.empty(delta.most_nbytes(values.numel(), values.element_size()), dtype=torch.uint8)
        if name == "gradient":
            sizes[name] = delta.encode_anchor(values, wire, 1)
        else:
            sizes[name] = delta.encode(values, before[name], wire, (0, 1), digest(before[name]))
    nbytes = after["parameters"].nbytes
    alike = [f"{sizes[name] / nbytes:.3f}" for name in ("parameters", "exp_avg", "exp_avg_sq")]
    copy = sum(sizes[name] for name in ("parameters", "exp_avg", "exp_avg_sq")) / (3 * nbytes)
    gradients = apart * sizes["gradient"] / (3 * nbytes)
    return [str(dtype).removeprefix("torch."), str(apart), *alike, f"{copy:.3f}", f"{gradients:.3f}"]


def steps_on(hosts: TwoHosts, copies: int, steps: int, batch: int) -> tuple[float, float, float]:
    """Seconds of a step on two hosts, and megabytes of the first copy and of a later one."""
    with tempfile.TemporaryDirectory(prefix="mcr-leaving-") as folder:
        options: dict[str, Any] = {"buddies": {"steps": copies}} if copies else {}
        job = {"folder": folder, "sharded": True, "leaves": False, "elastic": options,
               "width": 384, "blocks": 4, "batch": batch, "steps": steps}  # fmt: skip
        before = os.environ.get(_JOB)
        os.environ[_JOB] = json.dumps(job)
        try:
            hosts.torchrun([sys.executable, __file__], timeout=300)
        finally:
            os.environ[_JOB] = before or ""
        told = json.loads(Path(folder, "notes.0").read_text())
    notes, sent = told["notes"], told["sent"]
    # From the second copy on, whole periods: before it, the program compiles kernels.
    begin = max(copies // 2, steps // 6)
    last = begin + (len(notes) - 1 - begin) // max(1, copies // 2) * max(1, copies // 2)
    seconds = (notes[last][2] - notes[begin][2]) / (last - begin)
    return seconds, sent[0] / 1e6 if sent else 0.0, median(sent[1:]) / 1e6 if sent[1:] else 0.0


def main(
    notices: Annotated[int, typer.Option(help="Ranks told to leave.")] = 30,
    sharded_notices: Annotated[int, typer.Option(help="Ranks with shards told to leave.")] = 9,
    rounds: harness.Rounds = 3,
    copies: Annotated[int, typer.Option(min=2, help="buddies: {steps: …}.")] = 40,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a rank on two hosts.")] = 16,
    rate: harness.Rate = "1gbit",
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    """Measure and write the report."""
    parts = []
    rows = []
    for what, count, sharded, width in (
        ("replicas", notices, False, 64),
        ("FSDP2", sharded_notices, True, 64),
    ):
        found: list[float] = []
        while len(found) < count:
            found += pauses(sharded, width)
        if found:
            ordered = sorted(found)
            high = ordered[int(0.99 * (len(found) - 1))]
            rows.append(
                [what, str(len(found)), "0", *(f"{each:.2f}" for each in (median(found), high, ordered[-1]))]
            )
    head = ["what", "notices", "steps lost", "pause, s", "99 %", "most"]
    harness.show(head, rows)
    parts.append(harness.markdown(head, rows))
    head = ["what", "steps apart", "parameters", "exp_avg", "exp_avg_sq", "copy in delta / plain",
            "gradients of these steps / plain"]  # fmt: skip
    rows = [ratios(dtype, apart) for dtype in (torch.float32, torch.bfloat16) for apart in (1, copies // 2)]
    harness.show(head, rows)
    parts.append(harness.markdown(head, rows))
    if (reason := why_not(mpi=False)) is not None:
        print(f"left out, two hosts: {reason}")
    else:
        with TwoHosts(rate) as hosts:
            turns = harness.in_turns(
                {"without": 0, "buddies": copies},
                rounds,
                lambda each: steps_on(hosts, each, copies + copies // 2 + 2, batch),
            )
        ratio = [b[0] / w[0] for b, w in zip(turns["buddies"], turns["without"], strict=True)]
        seconds = [f"{median(each[0] for each in turns[name]):.3f}" for name in ("without", "buddies")]
        sizes = [f"{turns['buddies'][0][number]:.1f}" for number in (1, 2)]
        row = [rate, str(copies), *seconds, f"{median(ratio):.3f}", *sizes]
        head = [
            "link",
            "buddies: steps",
            "step, s",
            "with buddies, s",
            "ratio",
            "first copy, MB",
            "later, MB",
        ]
        harness.show(head, [row])
        parts.append(harness.markdown(head, [row]))
    note = "a pause is the time between two steps of the last rank; medians"
    harness.write(
        harness.page("Leaving on notice", harness.command(), note, *parts), output, f"leaving_{hardware}"
    )


run = harness.program(main)

if __name__ == "__main__":
    if os.environ.get(_JOB):
        on_rank(json.loads(os.environ[_JOB]))
    else:
        run()
