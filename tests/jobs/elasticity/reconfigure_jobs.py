"""Programs of processes that make worlds by handles, for tests/jobs/elasticity/test_reconfigure.py."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import mcr_plus as mcr
from mcr_plus.job import init, reconfigure

_CONFIG = {"version": 1, "pipeline": [{"fuse": {}}, {"select": {}}, {"dispatch": {"timeout": "30s"}}]}


class Meeting:
    """A folder in which processes exchange texts, whatever worlds they are in."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self.number = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])

    def post(self, what: str, text: str) -> None:
        """Write this process's text."""
        place = self._folder / f"{what}-{self.number}"
        place.with_suffix(".part").write_text(text)
        place.with_suffix(".part").rename(place)

    def read(self, what: str, number: int) -> str:
        """Wait for another one's text."""
        place = self._folder / f"{what}-{number}"
        while not place.exists():
            time.sleep(0.01)
        return place.read_text()

    def share(self, what: str, text: str, numbers: Sequence[int] = ()) -> list[str]:
        """The texts of some processes, this one among them, or of all."""
        self.post(what, text)
        return [self.read(what, number) for number in numbers or range(self.size)]

    def handles(self, what: str, numbers: Sequence[int] = ()) -> list[str]:
        """The handles of some processes, this one among them, or of all."""
        return self.share(what, mcr.reconfigure_handle(), numbers)


def _begin(config: dict[str, Any] | None = None, **options: Any) -> mcr.Communicator:
    torch.set_num_threads(1)
    return mcr.init(config or _CONFIG, **options)


def _two_and_one(number: int, third: dict[str, Any] | None = None) -> mcr.Communicator:
    """Processes 0 and 1 in one world, and process 2 alone, with a store of its own and this configuration."""
    before = dict(os.environ)
    try:
        if number < 2:
            os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            return _begin()
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
            os.environ.pop(name, None)
        return _begin(third)
    finally:
        os.environ |= before


def _sum(value: float) -> float:
    x = torch.full((3,), value)
    mcr.all_reduce(x)
    return x[0].item()


def _error(call: Callable[[], Any]) -> str:
    """The kind and the text of the error that a call raises; empty if it raises none."""
    try:
        call()
    except mcr.McrError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _replace(module: ModuleType, function: str) -> None:
    """Let the process die where it would call this function."""
    setattr(module, function, lambda *_, **__: _die())


def in_reversed_order(folder: str) -> dict[str, Any]:
    """The same three processes, ranks reversed; a wrapped model goes on in the new world."""
    meeting = Meeting(folder)
    before = _begin()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mcr.wrap(model, optimizer)
    pair = mcr.new_group([0, 1, 2])
    new = mcr.reconfigure("turned", meeting.handles("first")[::-1])
    ring = torch.zeros(2)
    sent = new.isend(torch.full((2,), float(new.rank)), (new.rank + 1) % 3)
    new.recv(ring, (new.rank - 1) % 3)
    assert sent is not None
    sent.wait()
    root = torch.full((2,), float(new.rank))
    new.broadcast(root, 0)
    model(torch.full((1, 2), 1.0 + new.rank)).sum().backward()
    assert model.weight.grad is not None
    result = {
        "before": before.rank,
        "rank": new.rank,
        "is_world": new is mcr.world(),
        "sum": _sum(10.0**new.rank),
        "signed": bool(init.current().world.secret),
        "ring": ring.tolist(),
        "root": root.tolist(),
        "gradient": model.weight.grad.tolist(),
        "errors": [_error(partial(each.all_reduce, root)).partition(":")[0] for each in (before, pair)],
    }
    mcr.finalize()
    return result


def with_residuals(folder: str, how: str) -> dict[str, Any]:
    """The residuals of error feedback before, and what there is of them in a world in reversed order."""
    meeting = Meeting(folder)
    compress = {"codec": "topk", "ratio": 0.1, "error_feedback": True}
    config = {"version": 1, "pipeline": [{"compress": compress}, {"select": {}}, {"dispatch": {}}]}
    torch.set_num_threads(1)
    group: Any = None
    if how == "mcr":
        comm = _begin(config, backends=["gloo"])
    else:
        dist.init_process_group("mcr", pg_options=config | {"backends": ["gloo"]})
        group = dist.group.WORLD
        mcr.wrap(model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))
        comm = group.communicator
    generator = torch.Generator().manual_seed(comm.rank)
    comm.all_reduce(torch.randn(500, generator=generator), "AVG", tag="a")
    state = comm.pipeline.state()
    own = [
        each.tensor.tolist() for (stage, _), value in state.items() if stage == "compress" for each in value
    ]
    handles = meeting.handles("first")[::-1]
    if how == "mcr":
        mcr.reconfigure("turned", handles)
    else:
        group.reconfigure(SimpleNamespace(uuid=1, handles=handles))
    entries = mcr.state_dict()["codecs"]["world"]
    kept = [each.tolist() for tensors in entries.values() for each in tensors.values()]
    mcr.finalize() if how == "mcr" else dist.destroy_process_group()
    return {"own": own, "kept": kept}


def without_one(folder: str, left_out: int) -> dict[str, Any]:
    """Two of three processes go on; the third one's world says so; then it comes back."""
    meeting = Meeting(folder)
    comm = _begin()
    stay = [each for each in range(3) if each != left_out]
    handles = meeting.handles("first")
    result: dict[str, Any] = {"before": comm.rank}
    if comm.rank == left_out:
        result["error"] = _error(lambda: _sum(1.0))
    else:
        new = mcr.reconfigure("fewer", [handles[each] for each in stay])
        result |= {"rank": new.rank, "size": new.size, "sum": _sum(10.0**comm.rank)}
    again = mcr.reconfigure("all", meeting.handles("second"))
    result |= {"again": [again.rank, again.size, _sum(1.0)]}
    mcr.finalize()
    return result


def split_and_merged(folder: str) -> dict[str, Any]:
    """All alone, all together, and halves that merge; identity; a set of handles."""
    meeting = Meeting(folder)
    number = meeting.number
    _begin()
    seen: dict[str, Any] = {}

    def note(what: str, comm: mcr.Communicator) -> None:
        seen[what] = [comm.rank, comm.size, _sum(10.0**number)]

    note("alone", mcr.reconfigure(f"alone {number}", [mcr.reconfigure_handle()]))
    note("all", mcr.reconfigure("all", meeting.handles("1")))
    note("identity", mcr.reconfigure("identity", meeting.handles("2")))
    part = [0] if number == 0 else [1, 2]
    note("part", mcr.reconfigure(f"part {part}", meeting.handles("3", part)))
    note("merged", mcr.reconfigure("merged", meeting.handles("4")))
    # Process 0 leaves for a world of its own, and the others wait in the old one.
    if number == 0:
        note("late", mcr.reconfigure("early", [mcr.reconfigure_handle()]))
    note("joined", mcr.reconfigure("joined", meeting.handles("5")))
    note("set", mcr.reconfigure("set", set(meeting.handles("6"))))
    mcr.finalize()
    return seen


def with_a_newcomer(folder: str) -> dict[str, Any]:
    """Process 2 has begun alone, with a store of its own; it becomes rank 0 of a world with the others."""
    meeting = Meeting(folder)
    before = _two_and_one(meeting.number)
    handles = meeting.handles("first")
    new = mcr.reconfigure("grown", [handles[each] for each in (2, 0, 1)])
    values = new.all_gather_object(meeting.number)
    result = {"before": before.size, "rank": new.rank, "values": values, "sum": _sum(1.0)}
    mcr.finalize()
    return result


def refused(folder: str) -> dict[str, Any]:
    """Attempts that cannot be; the old world works after each of them, and another attempt succeeds."""
    meeting = Meeting(folder)
    comm = _begin()
    handles, rank = meeting.handles("first"), comm.rank
    others = [each for each in range(3) if each != rank]
    began = time.monotonic()
    texts = {
        "absent": _error(lambda: mcr.reconfigure("absent", handles, "1s")) if rank != 1 else "",
        "waited": time.monotonic() - began,
        "differ": _error(lambda: mcr.reconfigure("differ", handles if rank else handles[::-1], "20s")),
        "twice": _error(lambda: mcr.reconfigure("twice", [*handles, handles[0]])),
        "own": _error(lambda: mcr.reconfigure("own", [handles[each] for each in others])),
        "none": _error(lambda: mcr.reconfigure("none", [])),
        "handle": _error(lambda: mcr.reconfigure("handle", [*handles, "mcr1:abc"])),
        "number": _error(lambda: mcr.reconfigure("number", [*handles, 3])),  # type: ignore[list-item]
        "uuid": _error(lambda: mcr.reconfigure("", handles)),
        "timeout": _error(lambda: mcr.reconfigure("timeout", handles, "soon")),
    }
    sums = [_sum(1.0)]
    mcr.reconfigure("new", handles)
    sums.append(_sum(1.0))
    fresh = meeting.handles("second")
    mixed = [fresh[0], handles[1], fresh[2]]
    texts["stale"] = _error(lambda: mcr.reconfigure("stale", mixed, "20s"))
    texts["used"] = _error(lambda: mcr.reconfigure("new", fresh))
    sums.append(_sum(1.0))
    # Process 0 and 2 use the uuid of an attempt in which process 1 was rank 1.
    again = [fresh[0], fresh[2]]
    texts["used by others"] = _error(lambda: mcr.reconfigure("new", again)) if rank != 1 else ""
    sums.append(_sum(1.0))
    comm = mcr.reconfigure("newer", fresh)
    sums.append(_sum(1.0))
    mcr.finalize()
    return {"texts": texts, "sums": sums, "size": comm.size}


def that_differ(folder: str) -> dict[str, Any]:
    """A newcomer with another configuration is refused before it disturbs the others."""
    meeting = Meeting(folder)
    other = {"version": 1, "pipeline": [{"select": {}}, {"dispatch": {"timeout": "31s"}}]}
    _two_and_one(meeting.number, other)
    handles = meeting.handles("first")
    text = _error(lambda: mcr.reconfigure("differ", handles))
    result = {"text": text, "sum": _sum(1.0)}
    mcr.finalize()
    return result


def with_a_death(folder: str, when: str) -> dict[str, Any]:
    """Process 1 dies before all have come, once all have, or while the world is made."""
    meeting = Meeting(folder)
    comm = _begin()
    handles, rank = meeting.handles("first"), comm.rank
    if rank == 1:
        if when == "before":
            _die()
        if when == "come":
            _replace(reconfigure, "close_world")
        else:
            _replace(init, "begin")
    began = time.monotonic()
    text = _error(lambda: mcr.reconfigure("first", handles, "20s"))
    seconds = time.monotonic() - began
    old = _error(lambda: comm.all_reduce(torch.ones(1)))
    left = meeting.handles("second", [0, 2])
    new = mcr.reconfigure("second", left)
    result = {
        "text": text,
        "old": old.partition(":")[0],
        "seconds": seconds,
        "rank": new.rank,
        "sum": _sum(1.0 + rank),
    }
    mcr.finalize()
    return result


def many_times(folder: str, count: int) -> dict[str, Any]:
    """File descriptors and threads after each of many reconfigurations, in which ranks are turned."""
    meeting = Meeting(folder)
    _begin()
    seen = []
    for number in range(count):
        x = torch.ones(100)
        work = mcr.world().all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        handles = mcr.world().all_gather_object(mcr.reconfigure_handle())
        comm = mcr.reconfigure(f"number {number}", handles[1:] + handles[:1])
        assert comm.size == meeting.size
        seen.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    mcr.finalize()
    return {"seen": seen}


def before_init() -> dict[str, Any]:
    """What the functions raise without a world."""
    texts = [_error(mcr.reconfigure_handle), _error(lambda: mcr.reconfigure("new", ["handle"]))]
    return {"texts": texts}
