"""The pipeline while it binds: messages between stages, and dispatch's notes on an operation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcr_plus import registry
from mcr_plus.backends import backend_class
from mcr_plus.config.reader import load
from mcr_plus.core.group import Group
from mcr_plus.core.message import Signature
from mcr_plus.pipeline.pipeline import Note, Pipeline
from mcr_plus.pipeline.stage import Context, Issue, Next, Stage
from mcr_plus.rendezvous.world import World

SUM = Signature("all_reduce", torch.float32, (4,), 16, "world", 2, reduce_op="SUM", backend="gloo")


class Several(Stage):
    """Issues the operation itself and others in its place."""

    def bind(self, signature: Signature, next: Next) -> Issue:
        for changes in (
            {}, {"tag": "x"}, {"shape": (2,), "nbytes": 8}, {"dtype": torch.float16, "nbytes": 8},
            {"kind": "all_gather", "reduce_op": None},
        ):  # fmt: skip
            issue = next(signature.replace(**changes))
        return issue


def notes(signature: Signature, *stages: str, hosts: tuple[str, str] = ("here", "here")) -> list[Note]:
    """Return dispatch's notes on the operations to which one is bound."""
    config = load({"version": 1, "pipeline": [{name: {}} for name in (*stages, "select", "dispatch")]})
    backends = {name: backend_class(name) for name in ("msccl", "gloo")}
    context = Context(config, World(0, 2, hosts, 300.0), Group("world", (0, 1), 0), backends)
    return [note for note in Pipeline(context).bind(signature).notes if note.stage == "dispatch"]


@pytest.mark.parametrize("async_op", [False, True])
def test_operations_in_place_of_another_may_be_in_flight_together(
    async_op: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replacements of another kind, dtype or shape are asynchronous, even if the caller waits."""
    stages: dict[str, Any] = {**registry.STAGES, "several": Several}
    monkeypatch.setitem(registry.REGISTRIES, "stages", stages)
    found = notes(SUM.replace(async_op=async_op), "several")
    assert [note.signature.async_op for note in found] == [async_op, async_op, True, True, True]


def test_ranks_compare_what_the_library_does_not_keep_apart() -> None:
    vector = SUM.replace(backend="msccl", kind="all_gather_v", reduce_op=None, nbytes=None)
    every = "ranks compare what they issue at every call"
    first = "ranks compare what they issue the first time; later msccl keeps operations that differ apart"
    gathered = SUM.replace(kind="all_gather", reduce_op=None)
    for signature, said in (
        (SUM, every),
        (SUM.replace(backend="msccl"), first),
        (gathered, every),
        (vector, first),
        (vector.replace(encoding="fp16"), every),  # the library sees encoded bytes, not how many values
        (SUM.replace(backend="msccl", encoding="fp16"), first),
    ):
        (note,) = notes(signature)
        assert note.text.endswith(said)
    for signature, said in (
        (SUM, every),
        (gathered, first.replace("msccl", "gloo")),  # a message each way between two ranks on two hosts
        (gathered.replace(ranks=3), every),
    ):
        (note,) = notes(signature, hosts=("here", "there"))
        assert note.text.endswith(said)
