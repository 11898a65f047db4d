"""The seams that later parts plug into, each proven by the smallest thing of its shape."""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import nursery, run_ranks

import mcr_plus as mcr
from mcr_plus import registry
from mcr_plus.config.options import NoOptions
from mcr_plus.config.reader import load
from mcr_plus.core import c10d
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.work import Info, JointWork, Work
from mcr_plus.job import runtime
from mcr_plus.job.runtime import Runtime
from mcr_plus.pipeline.stage import Context, Issue, Next
from mcr_plus.pipeline.state import StateTensor

# -- fusion's shape: holds two messages, issues one ---------------------------------------------------


class HeldWork(Work):
    """A member of a pair: waiting for it sends the pair."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def wait(self, timeout: float | timedelta | None = None) -> None:
        self._pair.send().wait(timeout)

    def is_completed(self) -> bool:
        return self._pair.sent is not None and self._pair.sent.is_completed()

    def exception(self) -> BaseException | None:
        return None if self._pair.sent is None else self._pair.sent.exception()

    def then(self, function: Callable[[], None]) -> Work:
        self._pair.following.append(function)
        return self

    @property
    def info(self) -> Info:
        assert self._pair.sent is not None
        return self._pair.sent.info


def _copier(source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    def copy() -> None:
        target.copy_(source)

    return copy


class Pair:
    """Up to two tensors that travel as one."""

    def __init__(self, issue: Callable[[int], tuple[Issue, Signature]]) -> None:
        self._issue = issue
        self.messages: list[Message] = []
        self.following: list[Callable[[], None]] = []
        self.sent: Work | None = None

    def send(self) -> Work:
        if self.sent is None:
            tensors = [message.outputs[0].view(-1) for message in self.messages]
            flat = torch.cat(tensors)
            issue, signature = self._issue(len(tensors))
            self.sent = issue(Message(signature, (flat,), (flat,), fused=len(tensors)))
            for index, tensor in enumerate(tensors):
                part = flat[index * tensor.numel() : (index + 1) * tensor.numel()]
                self.sent.then(_copier(part, tensor))
            for function in self.following:
                self.sent.then(function)
        return self.sent


class PairStage:
    """Holds an asynchronous all_reduce until a second one of the same signature comes."""

    Options = NoOptions

    def __init__(self, options: NoOptions, context: Context) -> None:
        self._open: list[Pair] = []

    def bind(self, signature: Signature, next: Next) -> Issue | Callable[[Message], Work]:
        if signature.kind != "all_reduce" or not signature.async_op:
            return next(signature)
        assert signature.nbytes is not None
        numel = torch.Size(signature.shape).numel()
        bound: dict[int, tuple[Issue, Signature]] = {}
        for count in (1, 2):
            joint = signature.replace(shape=(count * numel,), nbytes=count * signature.nbytes)
            bound[count] = (next(joint), joint)
        pair: list[Pair] = []

        def issue(message: Message) -> Work:
            if not pair or pair[0].sent is not None:
                pair[:] = [Pair(bound.__getitem__)]
                self._open.append(pair[0])
            current = pair[0]
            current.messages.append(message)
            if len(current.messages) == 2:
                current.send()
                pair.clear()
            return HeldWork(current)

        return issue  # a plain callable is an issue's start

    def flush(self) -> None:
        for pair in self._open:
            pair.send()
        self._open.clear()


PIPELINE = [{"compress": {"codec": "none"}}, {"select": {}}, {"dispatch": {"timeout": "20s"}}]


def _init(stage: str | None = None, **more: Any) -> mcr.Communicator:
    torch.set_num_threads(1)
    pipeline = PIPELINE if stage is None else [{stage: {}}, *PIPELINE]
    return mcr.init({"version": 1, "pipeline": pipeline, **more})


def hold_two_issue_one() -> dict[str, Any]:
    registry.register("stages", "pair", PairStage)
    comm = _init("pair", backends=["mpi", "gloo"])
    tensors = [torch.full((3,), float(comm.rank + 10 * index)) for index in range(3)]
    with mcr.record() as log:
        works = [mcr.all_reduce(tensor, async_op=True) for tensor in tensors]
        assert works[0] is not None
        works[0].wait()
        comm.flush()  # the third is alone in its bucket
        works[2].wait()  # type: ignore[union-attr]
    result = {
        "values": [tensor.tolist() for tensor in tensors],
        "fused": [record.fused for record in log.records],
        "bytes": [record.bytes for record in log.records],
    }
    late = torch.ones(2)
    mcr.all_reduce(late, async_op=True)  # no wait: finalize sends it
    mcr.finalize()
    return {**result, "late": late.tolist()}


def test_stage_may_hold_messages_and_issue_one() -> None:
    for result in run_ranks(hold_two_issue_one, 2):
        assert result.value["values"] == [[1.0] * 3, [21.0] * 3, [41.0] * 3]
        assert result.value["fused"] == [2, 1]
        assert result.value["bytes"] == [24, 12]
        assert result.value["late"] == [2.0, 2.0]


# -- compression's and hierarchy's shape: one op becomes two on two libraries ------------------------


class TwoStepStage:
    """all_reduce = reduce_scatter on one library, then all_gather on another."""

    Options = NoOptions

    def __init__(self, options: NoOptions, context: Context) -> None:
        self._rank = context.group.rank

    def bind(self, signature: Signature, next: Next) -> Issue:
        numel = torch.Size(signature.shape).numel()
        if signature.kind != "all_reduce" or numel % signature.ranks:
            return next(signature)
        nbytes = numel * 4
        shard = (numel // signature.ranks,)
        scatter = signature.replace(kind="reduce_scatter", shape=shard, backend="mpi")
        gather = signature.replace(kind="all_gather", shape=shard, backend="gloo", reduce_op=None)
        first, second = next(scatter), next(gather)

        def issue(message: Message) -> Work:
            value = message.outputs[0].view(-1)
            part = value.new_empty(shard)
            begun = first(Message(scatter, (value,), (part,)))
            ended = second(Message(gather, (part,), (value,), after=begun))
            return JointWork([begun, ended], signature.kind, nbytes=nbytes, tag=signature.tag)

        return Issue(issue)


def one_becomes_two() -> dict[str, Any]:
    registry.register("stages", "two_step", TwoStepStage)
    comm = _init("two_step", backends=["mpi", "gloo"])
    first, second = (torch.arange(4.0) + comm.rank * 10**power for power in (1, 2))
    plain = torch.ones(3)
    with mcr.record() as log:
        # Two rewritten operations and a plain one are in flight on both libraries, waited for in any order.
        works = [mcr.all_reduce(first, async_op=True), mcr.all_reduce(second, async_op=True)]
        odd = mcr.all_reduce(plain, async_op=True, backend="gloo")
        for work in (odd, *(works if comm.rank else reversed(works))):
            assert work is not None
            work.wait()
        again = torch.full((2,), float(comm.rank))
        mcr.all_reduce(again)
    info = works[0].info if works[0] is not None else None
    mcr.finalize()
    return {
        "values": [tensor.tolist() for tensor in (first, second, plain, again)],
        "ways": sorted({(record.kind, record.backend) for record in log.records}),
        "info": [info.kind, info.backend, info.bytes] if info else None,
    }


def test_stage_may_rewrite_an_op_into_two_on_two_libraries() -> None:
    for result in run_ranks(one_becomes_two, 2):
        index = torch.arange(4.0)
        expected = [(2 * index + 10).tolist(), (2 * index + 100).tolist(), [2.0] * 3, [1.0] * 2]
        assert result.value["values"] == expected
        ways = [["all_gather", "gloo"], ["all_reduce", "gloo"], ["reduce_scatter", "mpi"]]
        assert result.value["ways"] == ways
        assert result.value["info"] == ["all_reduce", "mpi+gloo", 16]


# -- MSCCL's shape: an outside package brings a backend with algorithms ------------------------------

DOCUMENTS = Path(__file__).parents[3] / "docs"


def documented(page: str, module: str) -> str:
    """The module that a page of the documentation shows."""
    block = rf"^```python\n(# {module}\.py\n.*?)^```$"
    (found,) = re.findall(block, (DOCUMENTS / page).read_text(), re.DOTALL | re.MULTILINE)
    return str(found)


def _install_outside(folder: Path) -> None:
    """Write what pip leaves behind for packages with entry points: the parts that the docs show."""
    for module, page, entry in (
        ("toystore", "adding-a-backend.md", "[mcr_plus.backends]\ntoystore = toystore:StoreBackend\n"),
        ("chunk", "adding-a-stage.md", "[mcr_plus.stages]\nchunk = chunk:ChunkStage\n"),
        (
            "seen",
            "extend.md",
            "[mcr_plus.sinks]\nlines = seen:SINK\n[mcr_plus.hooks]\nslow = seen:Slow\n",
        ),
    ):
        (folder / f"{module}.py").write_text(documented(page, module))
        info = folder / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry)


def use_outside_backend(folder: str) -> dict[str, Any]:
    sys.path.insert(0, folder)
    rules = [{"match": {"tag": "star.*"}, "backend": "toystore:star"}]
    comm = _init(backends=["mpi", "toystore"], rules=rules)
    values = []
    with mcr.record() as log:
        for options in ({"backend": "toystore"}, {"backend": "toystore:all"}, {"tag": "star.x"}, {}):
            value = torch.arange(3.0) + comm.rank
            mcr.all_reduce(value, **options)  # type: ignore[arg-type]
            values.append(value.tolist())
    with pytest.raises(mcr.Unsupported, match="algorithm 'ring'; known: all, star"):
        mcr.all_reduce(torch.ones(1), backend="toystore:ring")
    mcr.finalize()
    return {"values": values, "backends": [record.backend for record in log.records]}


def test_outside_package_brings_a_backend_with_algorithms(tmp_path: Path) -> None:
    _install_outside(tmp_path)
    for result in run_ranks(use_outside_backend, 2, args=[str(tmp_path)]):
        assert result.value["values"] == [[1.0, 3.0, 5.0]] * 4
        assert result.value["backends"] == ["toystore", "toystore:all", "toystore:star", "mpi"]


def use_outside_stage(folder: str) -> dict[str, Any]:
    sys.path.insert(0, folder)
    following = [{"compress": {"codec": "none"}}, {"select": {}}, {"dispatch": {}}]
    pipeline = [{"chunk": {"size": "4KiB"}}, *following]
    rules = [{"match": {"tag": "fine"}, "chunk": {"size": "1KiB"}}]
    comm = mcr.init({"version": 1, "backends": ["gloo"], "pipeline": pipeline, "rules": rules})
    values, counts = {}, {}
    calls: list[tuple[str, int, dict[str, Any]]] = [
        ("small", 1000, {}),
        ("large", 3000, {}),
        ("fine", 3000, {"tag": "fine"}),
        ("compressed", 3000, {"compress": "bf16"}),
        ("asynchronous", 3000, {"async_op": True}),
    ]
    for name, numel, options in calls:
        value = torch.arange(float(numel)) % 7 + comm.rank
        with mcr.record() as log:
            work = mcr.all_reduce(value, **options)
            if work is not None:
                work.wait()
        values[name], counts[name] = value.tolist(), len(log.records)
    mcr.finalize()
    with pytest.raises(mcr.ConfigError, match=r"sise.*size"):
        load({"version": 1, "pipeline": [{"chunk": {"sise": "4KiB"}}, *following]})
    with pytest.raises(mcr.ConfigError, match=r"size.*many"):
        load({"version": 1, "pipeline": [{"chunk": {"size": "many"}}, *following]})
    found = mcr.explain("all_reduce", 12000, ranks=2, config={"version": 1, "pipeline": pipeline})
    decisions = [step["decision"] for step in found["steps"] if step["stage"] == "chunk"]
    return {"values": values, "counts": counts, "decisions": decisions}


def test_outside_package_brings_a_stage(tmp_path: Path) -> None:
    _install_outside(tmp_path)
    for result in run_ranks(use_outside_stage, 2, args=[str(tmp_path)], via="torch"):
        found = result.value
        assert found["counts"] == {"small": 1, "large": 3, "fine": 12, "compressed": 3, "asynchronous": 3}
        for value in found["values"].values():
            assert value == [2.0 * (index % 7) + 1.0 for index in range(len(value))]
        assert found["decisions"] == ["in 3 chunks of up to 4096 bytes"]


def use_outside_sink_and_hook(folder: str) -> dict[str, Any]:
    sys.path.insert(0, folder)
    registry.refresh()
    torch.set_num_threads(1)
    printed = io.StringIO()
    with redirect_stdout(printed):
        comm = mcr.init({"version": 1, "backends": ["gloo"], "observe": {"lines": f"{folder}/sums"}})
        time.sleep(1.5 * comm.rank)
        mcr.all_reduce(torch.ones(4), tag="x")
        mcr.finalize()
    with pytest.raises(
        mcr.ConfigError, match=r"observe\.line: unknown key 'line'; known: .*lines.*'lines'\?"
    ):
        load({"version": 1, "observe": {"line": "x"}})
    return {"sums": Path(f"{folder}/sums.{comm.rank}").read_text(), "printed": printed.getvalue()}


def test_outside_package_brings_a_sink_and_a_hook(tmp_path: Path) -> None:
    _install_outside(tmp_path)
    for result in run_ranks(use_outside_sink_and_hook, 2, args=[str(tmp_path)]):
        assert "mcr_operations 1.0\n" in result.value["sums"]
        assert result.value["printed"] == ["all_reduce x takes more than a second\n", ""][result.rank]


class MeanStage:
    """Keeps, by tag, the sum of the values that this rank has passed, and how many calls there were."""

    Options = NoOptions

    def __init__(self, options: NoOptions, context: Context) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.calls = 0
        self._kept: dict[str, Any] = {}

    def bind(self, signature: Signature, next: Next) -> Issue:
        bound, tag = next(signature), signature.tag
        if tag is None or signature.kind != "all_reduce":
            return bound
        earlier = self._kept.pop(f"sum {tag}", None)
        self.sums[tag] = torch.zeros(2) if earlier is None else earlier["sum"].clone()

        def start(message: Message) -> Work:
            self.sums[tag] += message.inputs[0]
            self.calls += 1
            return bound.start(message)

        return Issue(start)

    def state(self) -> dict[str, Any]:
        sums = {f"sum {tag}": [StateTensor("sum", "own", value)] for tag, value in self.sums.items()}
        return {**sums, "calls": self.calls}

    def load_state(self, kept: dict[str, Any]) -> None:
        self._kept = kept
        self.calls += kept.pop("calls", 0)


def keep_state_outside(folder: str) -> dict[str, Any]:
    """Two jobs: the second continues from the first's saved state, with one of its two operations."""
    registry.register("stages", "mean", MeanStage)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcr_plus").addHandler(handler)
    comm = _init("mean", backends=["gloo"])
    for step in range(3):
        for tag, factor in (("a", 1.0), ("b", 100.0)):
            mcr.all_reduce(torch.tensor([factor * comm.rank, step + comm.rank]), tag=tag)
    pair = mcr.new_group([1, 0])
    pair.all_reduce(torch.tensor([7.0, comm.rank]), tag="c")
    saved = mcr.state_dict()
    path = Path(folder, f"state{comm.rank}")
    torch.save(saved, path)
    mcr.finalize()
    comm = _init("mean", backends=["gloo"])
    mcr.load_state_dict(torch.load(path))
    mcr.all_reduce(torch.tensor([10.0 * comm.rank, 0.0]), tag="a")
    pair = mcr.new_group([1, 0])
    again = mcr.state_dict()
    for wrong in ({"mean": 3}, {"mean": {"world": 3}}, 3):
        with pytest.raises(mcr.InvalidArgument, match=r"mcr\.state_dict"):
            mcr.load_state_dict({**saved, "stages": wrong})
    mcr.finalize()

    def plain(state: dict[str, Any]) -> dict[str, Any]:
        return {
            group: {
                name: value if isinstance(value, int) else value["sum"].tolist()
                for name, value in sorted(entries.items())
            }
            for group, entries in state["stages"]["mean"].items()
        }

    return {"saved": plain(saved), "again": plain(again), "lines": lines}


def test_outside_stage_takes_part_in_saved_state(tmp_path: Path) -> None:
    results = [result.value for result in run_ranks(keep_state_outside, 2, args=[str(tmp_path)], via="torch")]
    for value in results:
        # The mean of ranks 0 and 1, which have passed rank * factor and step + rank in three calls.
        world = {"calls": 6, "sum a": [1.5, 4.5], "sum b": [150.0, 4.5]}
        assert value["saved"] == {"world": world, "group1": {"calls": 1, "sum c": [7.0, 0.5]}}
        world = {"calls": 7, "sum a": [6.5, 4.5], "sum b": [150.0, 4.5]}
        assert value["again"] == {"world": world, "group1": {"calls": 1, "sum c": [7.0, 0.5]}}
    assert any("2 loaded operations were never issued" in line for line in results[0]["lines"])


def test_doctor_lists_an_outside_backend(tmp_path: Path) -> None:
    _install_outside(tmp_path)
    command = [nursery().python, "-m", "mcr_plus.cli.main", "doctor", "--json"]
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    shown = subprocess.run(command, env=nursery().environ | path, capture_output=True, text=True, check=True)
    assert "toystore" in json.dumps(json.loads(shown.stdout))


# -- the drop-in's shape: a ProcessGroup of three methods under DDP ----------------------------------


class TorchWork(c10d.Work):
    """Our handle as torch sees it."""

    def __init__(self, work: Work, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._inner = work
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._inner.wait()
        return True

    def get_future(self) -> Any:
        self._inner.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future


class Shell(dist.ProcessGroup):
    """The methods of a process group that DDP needs, over a Communicator."""

    def __init__(self, comm: mcr.Communicator) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]  # the stubs lack this one
        self._comm = comm
        self._handles: list[TorchWork] = []  # in torch 2.6, C++ does not keep them alive

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "mcr_shell"

    def _handle(self, work: Work | None, result: list[torch.Tensor]) -> TorchWork:
        assert work is not None
        self._handles.append(TorchWork(work, result))
        return self._handles[-1]

    # The stubs demand every overload; DDP uses one.
    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self._handle(self._comm.all_reduce(tensors[0], "SUM", True, tag="ddp"), tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self._handle(self._comm.broadcast(tensors[0], self._comm.ranks[opts.rootRank], True), tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:  # type: ignore[override, unused-ignore]
        return self._handle(self._comm.all_gather(outputs[0], inputs[0], True), outputs)


def ddp_step() -> dict[str, Any]:
    comm = _init(backends=["mpi", "gloo"])
    dist.Backend.register_backend("mcr_shell", lambda *_: Shell(comm), devices=["cpu"])
    store = c10d.HashStore()
    dist.init_process_group("mcr_shell", store=store, rank=comm.rank, world_size=comm.size)
    torch.manual_seed(comm.rank)  # DDP must make the parameters equal
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    inputs = torch.arange(6.0).view(2, 3) + comm.rank
    model(inputs).square().mean().backward()
    gradients = [parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None]
    weights = [parameter.tolist() for parameter in model.parameters()]
    mcr.finalize()
    return {"gradients": gradients, "weights": weights}


def test_three_method_process_group_carries_a_ddp_step() -> None:
    first, second = (result.value for result in run_ranks(ddp_step, 2))
    assert first == second
    weight, bias = (torch.tensor(values, dtype=torch.float64) for values in first["weights"])
    weight.requires_grad_()
    bias.requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(2):
        inputs = torch.arange(6.0, dtype=torch.float64).view(2, 3) + rank
        total = total + torch.nn.functional.linear(inputs, weight, bias).square().mean() / 2
    expected = torch.autograd.grad(total, [weight, bias])
    for ours, right in zip(first["gradients"], expected, strict=True):
        assert torch.allclose(torch.tensor(ours, dtype=torch.float64), right, rtol=1e-5)


# -- lives that do not end together ------------------------------------------------------------------


def end_apart(seconds: float, finalize: bool) -> float:
    """`seconds`: longer than a rank waits for others at the end of its process, here one second."""
    setattr(runtime, "SHORT", 1.0)  # noqa: B010 - mypy: it is another module's name
    Runtime.wait_for_all_to_end.__defaults__ = (1.0,)
    comm = _init(backends=["mpi", "gloo"])
    mcr.all_reduce(torch.ones(3))
    if comm.rank == 1:
        time.sleep(seconds)  # a checkpoint, an evaluation
    if finalize:
        mcr.finalize()
    return seconds


@pytest.mark.long
@pytest.mark.parametrize("finalize", [True, False])
def test_job_ends_well_when_one_rank_finishes_seconds_later(finalize: bool) -> None:
    results = run_ranks(end_apart, 2, args=[2.5, finalize])
    assert [result.value for result in results] == [2.5, 2.5]


def drop_persistent() -> list[float]:
    comm = _init(backends=["mpi", "gloo"])
    right = []
    for backend in ("mpi", "gloo"):
        for op, expected in (("SUM", 3.0), ("AVG", 1.5)):
            for size in range(1000, 1010):
                # The operation is started and dropped, and its memory is requested again while it is in
                # flight.
                mcr.persistent("all_reduce", torch.ones(size), op=op, backend=backend).start()
                gc.collect()
                torch.zeros(size)
            kept = [torch.zeros(64), torch.zeros(64), torch.zeros(()).expand(1)]  # the last of stride 0
            calls = [mcr.persistent("all_reduce", tensor, op=op, backend=backend) for tensor in kept]
            for tensor in kept:
                tensor.fill_(comm.rank + 1)
            works = [call.start() for call in calls]  # two of one signature in flight, and a plain one
            plain = torch.full((64,), comm.rank + 1.0)
            mcr.all_reduce(plain, op, backend=backend)  # type: ignore[arg-type]
            for work in reversed(works):
                work.wait()
            right += [float((tensor == expected).all()) for tensor in (*kept, plain)]
    mcr.finalize()
    return right


def test_started_persistent_operations_live_until_they_are_done() -> None:
    for result in run_ranks(drop_persistent, 2):
        assert result.value == [1.0] * 16


# -- values that memory does not show ----------------------------------------------------------------


def reduce_negated(backend: str) -> list[float]:
    comm = _init(backends=["mpi", "gloo"])
    mcr.all_reduce(torch.ones(1), mcr.MAX, backend=backend)  # the same shape, so that its plan is known
    stored = torch.tensor([5.0 + 2 * comm.rank])
    negated = torch.complex(torch.zeros(1), stored).conj().imag  # -5 and -7, by a flag on the tensor
    assert negated.is_contiguous()
    assert negated.is_neg()
    mcr.all_reduce(negated, mcr.MAX, backend=backend)
    mcr.finalize()
    return [float(value) for value in negated]


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_lazily_negated_tensors_are_reduced_by_value(backend: str) -> None:
    for result in run_ranks(reduce_negated, 2, args=[backend]):
        assert result.value == [-5.0]
