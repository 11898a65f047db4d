"""Programs of ranks that train by inner and outer steps, for tests/jobs/local_sgd/test_local.py."""

from __future__ import annotations

import copy
import os
import signal
from functools import partial
from typing import Any

import torch
from jobs.elasticity.reconfigure_jobs import Meeting, _two_and_one
from local_oracle import INNER, Quadratic, load

import mcr_plus as mcr
from mcr_plus import registry

SGD = torch.optim.SGD
COURSES: list[tuple[dict[str, Any], float | None, int]] = [
    ({"every": 5}, None, 12),
    ({"every": 6, "fragments": 3, "delay": 4, "mix": 0.5}, None, 15),
    ({"every": 4, "fragments": 4}, 1.0, 9),
    ({"every": 3, "delay": 2, "warmup": 3}, 0.5, 10),
]
"""Settings, the learning rate of an outer SGD without momentum or None for the default, and steps."""


def begin(
    backend: str | None, rules: list[dict[str, Any]] | None = None, **dispatch: Any
) -> mcr.Communicator:
    torch.set_num_threads(1)
    stages = [{"fuse": {}}, {"compress": {}}, {"select": {}}, {"dispatch": {"timeout": "30s", **dispatch}}]
    config = {"version": 1, "pipeline": stages, "rules": rules or []}
    return mcr.init(config, backends=None if backend is None else [backend])


def made(model: torch.nn.Module, rate: float | None = None, **settings: Any) -> mcr.LocalSteps:
    outer = None if rate is None else partial(SGD, lr=rate)
    return mcr.local(model, SGD(model.parameters(), **INNER), outer, **settings)


def one_step(local: mcr.LocalSteps) -> None:
    local.inner.zero_grad()
    local.model.loss().backward()  # type: ignore[operator]
    local.step()


def outer_values(local: mcr.LocalSteps) -> list[float]:
    return [each for fragment in local.fragments for each in fragment.anchor.tolist()]


def values(local: mcr.LocalSteps) -> list[float]:
    return local.model.values()  # type: ignore[operator, no-any-return]


def parameters(model: torch.nn.Module) -> list[float]:
    return [each for param in model.parameters() for each in param.view(-1).tolist()]


def courses(backend: str, dispatch: dict[str, Any]) -> list[list[list[list[float]]]]:
    """Return the parameters and the outer parameters of each course and step."""
    found = []
    with begin(backend, **dispatch) as comm:
        for settings, rate, steps in COURSES:
            local = made(Quadratic(comm.rank), rate, **settings)
            course = []
            for _ in range(steps):
                one_step(local)
                course.append([values(local), outer_values(local)])
            found.append(course)
    return found


class Wide(torch.nn.Module):
    """Two layers with sizes that no block of a codec divides."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(61, 47), torch.nn.Linear(47, 5)
        self.rank = rank

    def loss(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.rank)
        x = torch.randn(8, 61, generator=generator)
        loss: torch.Tensor = (self.second(self.first(x).tanh()) - self.rank).square().mean()
        return loss


def codecs() -> dict[str, dict[str, Any]]:
    """Return, by codec and feedback, digests of the outer parameters after some rounds, or the error."""
    found: dict[str, dict[str, Any]] = {}
    with begin(None) as comm:
        for name in registry.names("codecs"):
            for feedback in ({}, {"error_feedback": True}, {"ef21": True}):
                compress = {"codec": name, **feedback}
                torch.manual_seed(comm.rank)
                try:
                    local = made(Wide(comm.rank), every=3, fragments=2, delay=1, mix=0.5, compress=compress)
                    with mcr.record() as log:
                        for _ in range(8):
                            one_step(local)
                    local.finish()
                    assert parameters(local.model) == outer_values(local)
                except mcr.InvalidArgument as error:
                    found[f"{name} {feedback}"] = {"refused": str(error)}
                    continue
                used = {str(each.codec) for each in log.records if (each.tag or "").startswith("outer.")}
                ends = [float(each.anchor.double().sum()) for each in local.fragments]
                finite = all(bool(each.anchor.isfinite().all()) for each in local.fragments)
                found[f"{name} {feedback}"] = {"ends": ends, "finite": finite, "codecs": sorted(used)}
    return found


def by_rule() -> dict[str, list[str]]:
    """Return the codecs of fragments by tag, under a rule for one of them."""
    rules = [{"match": {"tag": "outer.1"}, "compress": {"codec": "int8_block"}}]
    found: dict[str, list[str]] = {}
    with begin("gloo", rules) as comm:
        local = made(Wide(comm.rank), every=2, fragments=2)
        with mcr.record() as log:
            for _ in range(4):
                one_step(local)
        for each in log.records:
            found.setdefault(str(each.tag), []).append(str(each.codec))
    return {tag: sorted(set(names)) for tag, names in found.items()}


def between_nodes() -> dict[str, Any]:
    """A rule compresses fragments between nodes alone, on two nodes of two ranks."""
    torch.set_num_threads(1)
    stages = [{"hierarchical": {"nodes": [[0, 1], [2, 3]], "min": "1KiB"}}, {"compress": {}}]
    rule = {"match": {"tag": "outer.*"}, "hierarchical": {"inter": {"compress": {"codec": "int8_block"}}}}
    config = {"version": 1, "pipeline": [*stages, {"select": {}}, {"dispatch": {}}], "rules": [rule]}
    with mcr.init(config, backends=["gloo"]) as comm:
        torch.manual_seed(0)
        local = made(Wide(comm.rank), 1.0, every=3)
        before = outer_values(local)
        alone = copy.deepcopy(local.model)
        inner = SGD(alone.parameters(), **INNER)
        for _ in range(3):
            inner.zero_grad()
            alone.loss().backward()  # type: ignore[operator]
            inner.step()
        with mcr.record() as log:
            for _ in range(3):
                one_step(local)
        sent = {(each.group, each.codec) for each in log.records if (each.tag or "").startswith("outer.")}
        return {
            "sent": sorted(sent, key=str),
            "before": before,
            "own": parameters(alone),
            "outer": outer_values(local),
        }


def refusals() -> dict[str, str]:
    """Return the errors of a job."""
    with begin("gloo") as comm:
        model = Quadratic(comm.rank)
        other = torch.nn.Linear(2 + comm.rank, 2)
        inner = SGD(model.parameters(), lr=0.1)
        compressions: dict[str, Any] = {
            "unknown": {"codec": "int9_block"},
            "option": {"codec": "topk", "rate": 0.1},
            "no codec": {"ratio": 0.1},
            "powersgd": {"codec": "powersgd"},
            "number": 3,
        }
        found = {name: _refused(model, inner, compress=each) for name, each in compressions.items()}
        found["other"] = _refused(other, SGD(other.parameters(), lr=0.1))
        mcr.wrap(model, inner)
        found["wrapped"] = _refused(model, inner)
    return found


def _refused(model: torch.nn.Module, inner: torch.optim.Optimizer, **settings: Any) -> str:
    try:
        mcr.local(model, inner, **settings)
    except mcr.InvalidArgument as error:
        return str(error)
    return ""


def restored() -> bool:
    """Return whether runs that are saved and restored at each step end like an uninterrupted run."""
    settings: dict[str, Any] = {"every": 4, "fragments": 3, "delay": 2, "mix": 0.5, "compress": "int8_block"}

    def run(at: int) -> list[float]:
        local = made(Quadratic(comm.rank), **settings)
        for step in range(9):
            if step == at:
                saved = copy.deepcopy([each.state_dict() for each in (local.model, local.inner, local)])
                local = made(Quadratic(comm.rank), **settings)
                load((local.model, local.inner, local), saved)
            one_step(local)
        before = values(local) + outer_values(local)
        local.finish()
        return before + values(local) + outer_values(local)

    with begin("gloo") as comm:
        undisturbed = run(-1)
        return all(run(at) == undisturbed for at in range(9))


TOPK = {"codec": "topk", "ratio": 0.1, "error_feedback": True}
ENDINGS: dict[str, Any] = {
    "float32": None,
    "int8": "int8_block",
    "int4 feedback": {"codec": "int4_block", "error_feedback": True},
    "int2 feedback": {"codec": "int2_block", "error_feedback": {"decay": 0.5}},
    "topk feedback": TOPK,
    "topk": {"codec": "topk", "ratio": 0.1},
    "sign ef21": {"codec": "sign1", "ef21": True},
}
EXACT = ("float32", "int8", "int4 feedback", "sign ef21")
"""Those of `ENDINGS` that end exactly as well: of each kind of state one."""


def endings() -> dict[str, Any]:
    """Return, by codec, the state of ranks before `finish`, exact or not, and after it.

    With every codec one fragment was sent one step ago, the other three steps ago, and none is in flight.
    """
    found: dict[str, Any] = {}

    def residuals(local: mcr.LocalSteps) -> list[float]:
        """Return the unsent residuals of all fragments, end to end: their mean over ranks."""
        kept: list[float] = []
        states = mcr.state_dict()["codecs"].get("world", {})
        for fragment in local.fragments:
            total = torch.zeros_like(fragment.anchor)
            for name, tensors in states.items():
                if f"tag={fragment.tag} " in f"{name} ":
                    for key in ("residual", "shard"):
                        total += tensors.get(key, torch.zeros(())).view(-1)
            kept += total.tolist()
        return kept

    with begin("gloo") as comm:
        for name, compress in ENDINGS.items():
            for exact in (False, True)[: 1 + (name in EXACT)]:
                torch.manual_seed(comm.rank)
                local = made(Wide(comm.rank), every=4, fragments=2, delay=1, compress=compress)
                for _ in range(11):
                    one_step(local)
                assert [each.tokens for each in local.fragments] == [1, 3]
                assert all(each.flight is None for each in local.fragments)
                own = parameters(local.model)
                anchor, before, rounds = outer_values(local), residuals(local), local.rounds
                with mcr.record() as log:
                    local.finish(exact=exact)
                sent = [each for each in log.records if (each.tag or "").startswith("outer.")]
                ends = parameters(local.model)
                found[f"{name}{' exact' * exact}"] = {
                    "own": own, "anchor": anchor, "before": before, "after": residuals(local), "ends": ends,
                    "equal": ends == outer_values(local),
                    "codecs": sorted({str(each.codec) for each in sent}),
                    "bytes": sum(each.wire_bytes for each in sent), "rounds": local.rounds - rounds,
                }  # fmt: skip
                for _ in range(5):  # training continues
                    one_step(local)
                local.finish()
                found[f"{name}{' exact' * exact}"]["later"] = outer_values(local)
        uneven = made(Wide(comm.rank), every=6, fragments=2, delay=1, uneven=True, compress=TOPK)
        while uneven.rounds < 3:
            uneven._left -= 0.4 if comm.rank else 0.1  # as if computing had taken so long
            one_step(uneven)
        uneven.finish()
        found["uneven"] = {"steps": uneven.steps, "later": outer_values(uneven)}
    return found


def feedback() -> dict[str, Any]:
    """Test residuals with `mix`, of a second instance, and in a checkpoint."""
    found: dict[str, Any] = {"distances": {}}
    comm = begin("gloo")
    for codec in ({"codec": "int4_block"}, {"codec": "topk", "ratio": 0.1}):
        for mix in (1.0, 0.5):
            for own in ({}, {"error_feedback": True}, {"error_feedback": {"decay": 0.5}}):
                name = f"{codec['codec']} {mix} {own.get('error_feedback', False)}"
                found["distances"][name] = _distance(comm, mix, codec | own)
    found["kept"] = len(mcr.state_dict()["codecs"].get("world", {}))  # of the last one: the others are over

    def run(steps: int, states: Any = None) -> mcr.LocalSteps:
        torch.manual_seed(3)
        local = made(Wide(comm.rank), every=2, fragments=2, delay=1, mix=0.5, compress=TOPK)
        if states is not None:
            mcr.load_state_dict(states[0])
            load((local.model, local.inner, local), copy.deepcopy(states[1]))
        for _ in range(steps):
            one_step(local)
        return local

    first = run(7)
    numbers = [first.number]
    ends = [each.anchor.tolist() for each in first.fragments]
    kept = [first] if comm.rank else []  # this rank ends with it later than the others
    del first
    second = run(7)
    del kept
    numbers.append(second.number)
    found["numbers"] = numbers
    found["second"] = [each.anchor.tolist() for each in second.fragments] == ends
    saved = mcr.state_dict()
    states = copy.deepcopy([each.state_dict() for each in (second.model, second.inner, second)])
    residuals = [tensor for each in saved["codecs"]["world"].values() for tensor in each.values()]
    found["held"] = [bool(each.any()) for each in residuals]
    del second
    mcr.finalize()

    later = []
    for _ in range(2):
        comm = begin("gloo")
        for _ in range(numbers[1]):  # residuals are found by the numbers in the tags
            made(Wide(comm.rank))
        again = run(0, (saved, states))
        both = [saved["codecs"]["world"], mcr.state_dict()["codecs"]["world"]]
        found["restored"] = both[0].keys() == both[1].keys() and all(
            torch.equal(both[0][name][key], both[1][name][key]) for name in both[0] for key in both[0][name]
        )
        for _ in range(5):
            one_step(again)
        later.append([each.anchor.tolist() for each in again.fragments])
        again.finish()
        found["ends"] = [each.anchor.tolist() for each in again.fragments]
        del again
        mcr.finalize()
    found["again"] = later[0] == later[1]
    return found


def _distance(comm: mcr.Communicator, mix: float, compress: dict[str, Any]) -> float:
    """Return the outer parameters' final distance from the mean of ranks, without learning."""
    model = torch.nn.Linear(64, 33, bias=False)
    inner = SGD(model.parameters(), lr=0.0)
    local = mcr.local(model, inner, partial(SGD, lr=1.0), every=1, mix=mix, compress=compress)
    torch.manual_seed(comm.rank)
    with torch.no_grad():
        model.weight += torch.randn_like(model.weight)
    wanted = model.weight.detach().clone()
    comm.all_reduce(wanted, "AVG", compress=False)
    for _ in range(60):
        local.step()
    return (local.fragments[0].anchor - wanted.view(-1)).square().mean().sqrt().item()


TOKENS = [10, 30, 5]


def after_a_death(victim: int, at: int, delay: int, compress: Any = None) -> dict[str, Any]:
    """One of three ranks dies at a step; the others continue to the same number of steps."""
    comm = begin("gloo")
    rank = comm.rank
    local = made(Quadratic(rank), every=4, fragments=2, delay=delay, mix=0.5, compress=compress)
    before: list[int] = []
    losses = 0
    while local.steps < 20:
        if rank == victim and local.steps == at:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            one_step(local)
        except mcr.PeerLost:
            losses += 1
            before = [each.rounds for each in local.fragments]
            local.state_dict()  # the state of a lost world, with flights that will never arrive
            mcr.shrink()
            saved = local.state_dict()
            assert [each["rounds"] for each in saved["fragments"]] == before
            local.resume()
    local.finish()
    return {
        "losses": losses,
        "before": before,
        "rounds": [each.rounds for each in local.fragments],
        "values": values(local),
        "outer": outer_values(local),
        "steps": local.steps,
        "size": local.comm.size,
    }


def with_a_newcomer(folder: str) -> dict[str, Any]:
    """Two ranks train, a third one joins in the middle of a round, and begins with the outer parameters."""
    meeting = Meeting(folder)
    comm = _two_and_one(meeting.number)
    is_new = meeting.number == 2
    if not is_new:
        made(Quadratic(comm.rank))  # so that the instances in the old world have other numbers
    local = made(Quadratic(0 if is_new else comm.rank), every=4, fragments=2, delay=1, mix=0.5)
    local.model.problem = Quadratic(meeting.number).problem  # type: ignore[assignment]
    weighted = made(Quadratic(0 if is_new else comm.rank), 1.0, every=4, weighted=True)
    weighted.model.problem = Quadratic(meeting.number).problem  # type: ignore[assignment]
    moved: list[list[float]] = []  # before outer steps
    weighted.inner.register_step_post_hook(lambda *_: moved.append(values(weighted)))
    means: list[list[float]] = []

    def step() -> None:
        one_step(local)
        weighted.inner.zero_grad()
        weighted.model.loss().backward()  # type: ignore[operator]
        weighted.step(TOKENS[meeting.number])
        means.append(outer_values(weighted))

    if not is_new:
        for _ in range(10):
            step()
    outer = outer_values(local)
    mcr.reconfigure("three", meeting.handles("all"))
    local.resume()
    weighted.resume()
    begun = {
        "steps": local.steps,
        "position": local.position,
        "values": values(local),
        "outer": outer_values(local),
        "tags": [each.tag for each in (*local.fragments, *weighted.fragments)],
    }
    for _ in range(7):
        step()
    local.finish()
    begun |= {"moved": moved[-7:], "means": means[-7:]}
    return {"before": outer, "begun": begun, "values": values(local), "size": local.comm.size}
