"""Profiles made by hand, and clusters whose links have known rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mcr_plus.bucketing.topology import Topology
from mcr_plus.plans.blocks import Axis, ModelBlock, Profile

ITEMS, LENGTH, WIDTH = 16, 8, 32


def layer(
    number: int, *, forward: float = 0.01, params: int = 1 << 20, saved: int = 1 << 22, output: int = 1 << 18,
    items: int = ITEMS, length: int = LENGTH, heads: int = 4, **options: Any,
) -> ModelBlock:  # fmt: skip
    """Return a block of [items, length, width]; with `heads`, half of its parameters may be cut."""
    axes = {
        "batch": Axis(dims=(0,), parts=(items,), how="split"),
        "sequence": Axis(dims=(1,), parts=(length,), how="gather" if heads else "split"),
    }
    if heads:
        half = {"saved": saved // 2, "params": params // 2, "input": output}
        axes["heads"] = Axis(dims=(), parts=(heads,), how="sum", **half)
    given: dict[str, Any] = {
        "name": f"b{number}", "kind": "Layer", "forward": forward, "backward": 2 * forward,
        "forward_fixed": 0.0, "backward_fixed": 0.0, "recompute": forward, "params": {f"b{number}.w": params},
        "gradients": params, "optimizer": 2 * params, "saved": saved, "saved_before": 0, "transient": 0,
        "through": 0, "output": output, "shape": (items, length, WIDTH), "dtype": "float32", "axes": axes,
        "shared": (), "reads_batch": False, "random": False,
    }  # fmt: skip
    return ModelBlock(**{**given, **options})


def chain(blocks: Sequence[ModelBlock], items: int = ITEMS, length: int = LENGTH) -> Profile:
    """Return the profile of a model of these blocks."""
    return Profile(
        version=1, model="0", device="cpu", input=(items, length, WIDTH), state_of=None, unused=(),
        blocks=tuple(blocks),
    )  # fmt: skip


def cluster(
    nodes: int, ranks_per_node: int, inside: str = "10GB/s", nic: str = "10Gbit/s", **options: Any
) -> Topology:
    """Return a topology whose links have rates."""
    links = {"inside": {"rate": inside, "latency": "2us"}, "nic": {"rate": nic, "latency": "10us"}}
    return Topology.of({"nodes": nodes, "ranks_per_node": ranks_per_node, "links": links, **options})
