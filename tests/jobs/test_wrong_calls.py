"""Natural wrong calls: each says what is wrong and what to do instead, on two ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from ranks import run_ranks

import mcr_plus as mcr
from mcr_plus.config.reader import load

Calls = dict[str, tuple[Callable[[], object], str]]


def _model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def _wrapped_then(change: Callable[[Any, Any], None]) -> Callable[[], object]:
    def call() -> None:
        model, optimizer = mcr.wrap(*_model())
        change(model, optimizer)
        _step(model, optimizer)

    return call


def _other_dtype(model: Any, _optimizer: Any) -> None:
    model.weight = torch.nn.Parameter(model.weight.detach().double())
    model.bias = torch.nn.Parameter(model.bias.detach().double())
    model.forward = lambda x: x.double() @ model.weight.T + model.bias


def _added(_model: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    _model.extra = torch.nn.Parameter(torch.ones(1))


def _replaced(model: Any, _optimizer: Any) -> None:
    model.weight = torch.nn.Parameter(torch.zeros(2, 4))


def _frozen(model: Any, _optimizer: Any) -> None:
    model.weight.requires_grad_(False)


def _step_in_no_sync() -> None:
    model, optimizer = mcr.wrap(*_model())
    with mcr.no_sync(model):
        _step(model, optimizer)


def _step_after_no_sync() -> None:
    model, optimizer = mcr.wrap(*_model())
    with mcr.no_sync(model):
        model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def _waits(timeout: float) -> None:
    work = mcr.all_reduce(torch.ones(4), async_op=True)
    assert work is not None
    try:
        work.wait(timeout)
    finally:
        work.wait()


def _local_then_step() -> None:
    model, optimizer = _model()
    local = mcr.local(model, optimizer, every=2)
    _step(model, optimizer)
    local.finish()


def _elastic_without_with() -> None:
    model, optimizer = mcr.wrap(*_model())
    for _ in mcr.elastic(model, optimizer, steps=3):
        _step(model, optimizer)


def _from_thread() -> None:
    caught: list[Exception] = []

    def run() -> None:
        try:
            mcr.all_reduce(torch.ones(4))
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if caught:
        raise caught[0]


def _after_close() -> None:
    group = mcr.new_group([0, 1])
    group.close()
    group.all_reduce(torch.ones(2))


def _calls(comm: Any) -> Calls:
    ones, ints = torch.ones(4), torch.ones(4, dtype=torch.int64)
    peer = 1 - comm.rank
    return {
        "parameter replaced": (_wrapped_then(_replaced), "call mcr.wrap again"),
        "other dtype": (_wrapped_then(_other_dtype), "call mcr.wrap again"),
        "parameter added": (_wrapped_then(_added), "call mcr.wrap again"),
        "parameter frozen": (_wrapped_then(_frozen), "call mcr.wrap again"),
        "step in no_sync": (_step_in_no_sync, "leave the block before the last pass"),
        "step after no_sync": (_step_after_no_sync, "leave the block before the last pass"),
        "optimizer of another model": (lambda: mcr.wrap(_model()[0], _model()[1]), "none of the model's"),
        "wrap without optimizer": (lambda: mcr.wrap(_model()[0], None), "expected a torch.optim"),  # type: ignore[type-var]
        "wrap swapped": (lambda: mcr.wrap(*_model()[::-1]), "expected a torch.nn.Module"),  # type: ignore[type-var]
        "no_sync before wrap": (lambda: mcr.no_sync(_model()[0]).__enter__(), "mcr.wrap has not been called"),
        "local then optimizer.step": (_local_then_step, "call local.step()"),
        "local of a wrapped model": (lambda: mcr.local(*mcr.wrap(*_model())), "averages gradients"),
        "elastic without with": (_elastic_without_with, "in a `with` block"),
        "fsdp before fully_shard": (lambda: mcr.fsdp(_model()[0]), "fully_shard"),
        "group after close": (_after_close, "is closed: "),
        "other thread": (_from_thread, "take_over"),
        "codec on integers": (lambda: mcr.all_reduce(ints, compress="int8_block"), "takes float32"),
        "codec misspelt": (lambda: mcr.all_reduce(ones, compress="int8_blok"), "did you mean 'int8_block'"),
        "library misspelt": (lambda: mcr.all_reduce(ones, backend="glo"), "did you mean 'gloo'"),
        "library not opened": (lambda: mcr.all_reduce(ones, backend="nccl"), "is not part of this job"),
        "tag of a wrong type": (lambda: mcr.all_reduce(ones, tag=3), "tag: expected a string"),  # type: ignore[arg-type]
        "message tag of a wrong type": (lambda: mcr.send(ones, peer, tag="a"), "tag: expected an integer"),  # type: ignore[arg-type]
        "op misspelt": (lambda: mcr.all_reduce(ones, "average"), "did you mean 'AVG'"),  # type: ignore[arg-type]
        "wait(-1)": (lambda: _waits(-1), "-1 is negative"),
        "one tensor for all outputs": (lambda: mcr.all_gather([ones.clone()] * 2, ones), "more than once"),
        "one tensor twice": (lambda: mcr.all_reduce_coalesced([ones, ones]), "more than once"),
        "expanded": (lambda: mcr.all_reduce(ones[:1].expand(4)), "share memory"),
        "sparse": (lambda: mcr.all_reduce(torch.eye(3).to_sparse_csr()), "only strided"),
        "nested": (lambda: mcr.all_reduce(torch.nested.nested_tensor([ones, ones])), "only strided"),
        "scalar": (lambda: mcr.all_reduce(3.0), "expected a tensor"),  # type: ignore[arg-type]
        "list in place of a tensor": (lambda: mcr.all_reduce([1.0, 2.0]), "expected"),  # type: ignore[arg-type]
        "output too small": (
            lambda: mcr.all_gather_into_tensor(torch.ones(4), ones),
            "does not fit 2 × input",
        ),
        "indivisible": (
            lambda: mcr.reduce_scatter_tensor(torch.ones(2), torch.ones(5)),
            "does not fit 2 × output",
        ),
        "rank outside": (lambda: mcr.broadcast(ones, 7), "rank 7 is not in group"),
        "group of a rank that is not there": (
            lambda: mcr.new_group([5]),
            "expected distinct ranks from 0 to 1",
        ),
        "init twice": (lambda: mcr.init(), "call finalize first"),
        "rank()": (lambda: getattr(mcr, "rank"), "did you mean 'get_rank'"),  # noqa: B009
        "size()": (lambda: getattr(mcr, "size"), "did you mean 'get_world_size'"),  # noqa: B009
        "allreduce": (lambda: comm.allreduce(ones), "did you mean 'all_reduce'"),
        "get_rank of a group": (lambda: comm.get_rank(), "did you mean 'rank'"),
        "state of something else": (
            lambda: mcr.load_state_dict({"model": ones}),
            "expected what mcr.state_dict() returned",
        ),
        "key misspelt": (lambda: load({"pipelin": []}), "did you mean 'pipeline'"),
        "None in place of a tensor": (lambda: mcr.all_reduce(None), "expected"),  # type: ignore[arg-type]
    }


def wrong_calls() -> dict[str, str]:
    """Runs on ranks: make every call, and return what each has said."""
    said = {}
    with mcr.init() as comm:
        for name, (call, _) in _calls(comm).items():
            try:
                call()
                said[name] = "nothing"
            except Exception as error:
                said[name] = f"{type(error).__name__}: {error}"
            comm.barrier()
    return said


def test_wrong_calls_say_what_to_do() -> None:
    class Rank:
        rank = 0

    expected = {name: text for name, (_, text) in _calls(Rank()).items()}
    for result in run_ranks(wrong_calls, 2):
        silent = {
            name: result.value[name] for name, text in expected.items() if text not in result.value[name]
        }
        assert not silent
        assert len(result.value) >= 30


def unwaited() -> None:
    """Runs on ranks: leave asynchronous operations, of which three are to be named."""
    comm = mcr.init()
    kept = mcr.all_reduce(torch.ones(4), async_op=True)
    with mcr.record():
        mcr.all_reduce(torch.ones(8)[::2], async_op=True)
    mcr.isend(torch.ones(3), 1 - comm.rank, tag=1)
    mcr.irecv(torch.ones(3), 1 - comm.rank, tag=1)
    for _ in range(10):
        mcr.all_reduce(torch.ones(2), async_op=True).wait()  # type: ignore[union-attr]
    assert kept is not None


def test_asynchronous_operations_that_are_never_waited_for_are_named_at_the_end() -> None:
    for result in run_ranks(unwaited, 2):
        (line,) = [each for each in result.stderr.splitlines() if "never waited for" in each]
        assert line.startswith(f"rank {result.rank}: ")
        assert "2 x all_reduce SUM float32[4]" in line
        assert "1 x recv float32[3]" in line
        assert "float32[2]" not in line
        assert "send" not in line
        assert f"{__file__}:" in line


def waited_in_other_ways() -> None:
    """Runs on ranks: what is complete without a `wait` by the program, or by layers above."""
    comm = mcr.init()
    polled = mcr.all_reduce(torch.ones(4), async_op=True)
    while polled is not None and not polled.is_completed():
        pass
    mcr.isend(torch.ones(3), 1 - comm.rank)
    mcr.recv(torch.ones(3), 1 - comm.rank)
    works = [mcr.all_reduce(torch.ones(n), async_op=True) for n in range(1, 1500)]
    for work in works:
        work.wait()  # type: ignore[union-attr]
    with mcr.new_group([0, 1]) as group:
        group.all_reduce(torch.ones(5), async_op=True)
    model, optimizer = mcr.wrap(*_model())
    for step in mcr.elastic(model, optimizer, steps=3):
        with step:
            _step(model, optimizer)
    for step in mcr.elastic(model, optimizer, steps=3):
        with step:
            _step(model, optimizer)
        break
    mcr.finalize()


def test_operations_that_were_waited_for_are_not_named() -> None:
    for result in run_ranks(waited_in_other_ways, 2):
        assert "never waited for" not in result.stderr


def pull_of_nothing() -> str:
    """Runs on ranks: pull from a source that ends without a push."""
    with mcr.init() as comm:
        weights = mcr.sync(torch.nn.Linear(4, 2), src=0)
        try:
            if comm.rank == 1:
                weights.pull()
        except mcr.SyncClosed as closed:
            return str(closed)
    return ""


def test_a_pull_ends_with_a_source_that_never_pushes() -> None:
    assert "rank 0 has closed it" in run_ranks(pull_of_nothing, 2, timeout=120)[1].value
