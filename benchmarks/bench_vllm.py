"""Weights from a trainer into a server of vLLM on another host: bytes and seconds.

    python benchmarks/bench_vllm.py --degree 2 --output benchmarks/results/vllm_….md    with vLLM installed

The trainer changes a share of random values by one unit in the last place, and pushes. Seconds last from the
push until all workers of the server have loaded the version. In turns with it, gloo broadcasts all weights to
the server's process, which does not even load them. Bytes are those on the link, with all headers; the format
of vLLM's engine `sparse_nccl` has a position of 4 bytes and a value of 2 for each change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import harness
import torch
import torch.distributed as dist
import typer
from harness import Output
from two_hosts import ADDRESSES, TwoHosts, need_two_hosts

import mcr_plus as mcr
from mcr_plus.engines.tensor_parallel import tensor_parallel_offers

PORT: Final = 29511
WAIT: Final = 300.0


def main(
    rate: Annotated[str, typer.Option(help="Of the link, as tc writes it.")] = "100mbit",
    degree: Annotated[int, typer.Option(min=1, help="Tensor parallel degree of the server.")] = 1,
    density: Annotated[float, typer.Option(help="Share of the values that change.")] = 0.01,
    versions: Annotated[int, typer.Option(min=1)] = 9,
    role: Annotated[str, typer.Option(hidden=True)] = "",
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
    output: Output = None,
) -> None:
    """Measure, print, and write a report."""
    if folder is not None:
        return {"train": train, "serve": serve}[role](folder, degree, density, versions)
    need_two_hosts()
    with tempfile.TemporaryDirectory() as name, TwoHosts(rate) as hosts:
        words = [sys.executable, __file__, "--degree", str(degree), "--density", str(density)]
        words += ["--versions", str(versions), "--folder", name, "--role"]
        lines = hosts.beside([[*words, "train"], [*words, "serve"]])
        started = [subprocess.Popen(line, env=_environ(host, hosts)) for host, line in enumerate(lines)]
        try:
            for process in reversed(started):
                if process.wait(1200):
                    raise SystemExit(f"a program has ended with status {process.returncode}")
        finally:
            for process in started:
                process.kill()
        rows = json.loads(Path(name, "rows.json").read_text())
    _report(rows, rate, degree, density, output)
    return None


def _environ(host: int, hosts: TwoHosts) -> dict[str, str]:
    vllm = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    names = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": hosts.links[host]}
    return {**os.environ, **names, **(vllm if host else {})}


def _report(rows: list[dict[str, Any]], rate: str, degree: int, density: float, output: Path | None) -> None:
    numel, changed = rows[0]["numel"], median(row["changed"] for row in rows)
    ours, dense = (median(row[key] for row in rows) for key in ("seconds", "dense_seconds"))
    nbytes, dense_nbytes = (median(row[key] for row in rows) for key in ("bytes", "dense_bytes"))
    table = [
        ["mcr", f"{nbytes:,.0f}", f"{nbytes / changed:.2f}", f"{ours * 1e3:,.0f}"],
        ["format of sparse_nccl", f"{6 * changed:,.0f}", "6.00", "–"],
        ["gloo broadcast", f"{dense_nbytes:,.0f}", f"{dense_nbytes / changed:.2f}", f"{dense * 1e3:,.0f}"],
    ]
    loads = median(row["load_seconds"] for row in rows)
    note = (
        f"{numel:,} bfloat16 values, {density:.2%} changed per version; {rate}, tensor parallel {degree}, "
        f"medians of {len(rows)} versions. mcr / sparse_nccl's bytes: **{nbytes / (6 * changed):.3f}**; "
        f"dense / mcr's time: **{dense / ours:.1f}**. Of mcr's time, loading an update that has arrived took "
        f"{loads * 1e3:,.0f} ms."
    )
    text = harness.markdown(["way", "bytes on the link", "per change", "ms"], table)
    harness.write(harness.page("Weights into vLLM", harness.command(), note, text), output, "vllm")


# -- on the hosts ----------------------------------------------------------------------------------------


def train(folder: Path, degree: int, density: float, versions: int) -> None:
    """Push, then broadcast, as often as there are versions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16().requires_grad_(requires_grad=False)
    with mcr.init(backends=["gloo"]):
        offers = tensor_parallel_offers(model, degree) if degree > 1 else None
        weights = model.state_dict()
        sync = mcr.sync(weights, src=0, invite=folder / "policy.sync", offers=offers)
        model.save_pretrained(folder / "model.tmp")
        (folder / "model.tmp").rename(folder / "model")
        dist.init_process_group("gloo", f"tcp://{ADDRESSES[0]}:{PORT}", rank=0, world_size=2)
        flat = torch.cat([each.flatten() for each in weights.values()])
        random, rows = torch.Generator().manual_seed(1), []
        for version in range(1, versions + 2):  # the first one brings all weights
            changed = 0
            for each in weights.values():
                moved = torch.rand(each.shape, generator=random) < density
                each.copy_((each.view(torch.int16) ^ moved.to(torch.int16)).view(torch.bfloat16))
                changed += int(moved.sum())
            dist.barrier()
            sent, begin = _sent(), time.monotonic()
            sync.push()
            ends = _answer()
            row = {
                "numel": flat.numel(),
                "changed": changed,
                "bytes": _sent() - sent,
                "seconds": ends[0] - begin,
            }
            dist.barrier()
            sent, begin = _sent(), time.monotonic()
            dist.broadcast(flat, 0)
            ends += _answer()
            row |= {"dense_bytes": _sent() - sent, "dense_seconds": ends[2] - begin, "load_seconds": ends[1]}
            rows += [row] if version > 1 else []
        (folder / "rows.json").write_text(json.dumps(rows))
        dist.destroy_process_group()
        sync.close()


def serve(folder: Path, degree: int, density: float, versions: int) -> None:  # noqa: ARG001
    """Load each version as it comes."""
    while not (folder / "model").exists():
        time.sleep(0.2)
    from vllm import LLM

    llm = LLM(
        str(folder / "model"), tensor_parallel_size=degree, enforce_eager=True, max_model_len=128,
        skip_tokenizer_init=True, weight_transfer_config={"backend": "mcr"},
    )  # fmt: skip
    llm.init_weight_transfer_engine(
        {"init_info": {"invitation": str(folder / "policy.sync"), "timeout": WAIT}}
    )
    dist.init_process_group("gloo", f"tcp://{ADDRESSES[0]}:{PORT}", rank=1, world_size=2)
    flat = torch.empty(json.loads(_numel(folder)), dtype=torch.bfloat16)
    for _ in range(versions + 1):
        dist.barrier()
        while not all(
            arrived > loaded for arrived, loaded in llm.collective_rpc("mcr_plus", args=("versions",))
        ):
            time.sleep(0.002)
        begin = time.monotonic()
        llm.collective_rpc("mcr_plus", args=("update",))
        end = time.monotonic()
        _tell([end, end - begin])
        dist.barrier()
        dist.broadcast(flat, 0)
        _tell([time.monotonic()])
    dist.destroy_process_group()


def _numel(folder: Path) -> str:
    from safetensors import safe_open

    with safe_open(folder / "model" / "model.safetensors", "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    return str(sum(torch.Size(shape).numel() for shape in shapes))


def _tell(seconds: list[float]) -> None:
    """Send times of the clock that both hosts share."""
    dist.send(torch.tensor(seconds + [0.0] * (2 - len(seconds)), dtype=torch.float64), 0)


def _answer() -> list[float]:
    found = torch.zeros(2, dtype=torch.float64)
    dist.recv(found, 1)
    return found.tolist()


def _sent() -> int:
    """Bytes that this host has sent on its link."""
    return int(Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    harness.program(main)()
