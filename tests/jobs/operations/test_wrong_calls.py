"""Natural wrong calls on two ranks: each error names the mistake and the remedy."""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import torch
from ranks import run_ranks
from torch.nn.utils import prune

import mcr_plus as mcr
import mcr_plus.horovod as hvd
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


def _unfrozen(model: Any, _optimizer: Any) -> None:
    model.bias.requires_grad_(True)


def _assigned(model: Any, _optimizer: Any) -> None:
    model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)


def _another(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def _changed_with_another(
    change: Callable[[Any, Any], None], *, by_forward: bool = True, is_frozen: bool = False
) -> Callable[[], object]:
    """Train, change the model, and train with another optimizer; the forward pass or the optimizer raises."""

    def call() -> None:
        model, optimizer = _model()
        if is_frozen:
            model.bias.requires_grad_(False)
        mcr.wrap(model, optimizer)
        _step(model, optimizer)
        change(model, optimizer)
        if by_forward:
            model(torch.ones(1, 4))
        else:
            _step(model.eval(), _another(model))

    return call


def _step_within_backward() -> None:
    model, optimizer = mcr.wrap(*_model())
    hook = cast("torch.Tensor", model.weight).register_post_accumulate_grad_hook(lambda _: optimizer.step())
    try:
        model(torch.ones(1, 4)).sum().backward()
    finally:
        hook.remove()


def _step_in_no_sync(*, another: bool, closure: bool = False) -> None:
    model, optimizer = mcr.wrap(*_model())
    optimizer = _another(model) if another else optimizer

    def backward() -> float:
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        return float(loss)

    with mcr.no_sync(model):
        if closure:
            optimizer.step(backward)
        else:
            _step(model, optimizer)


def _step_after_no_sync(*, another: bool) -> None:
    model, optimizer = mcr.wrap(*_model())
    optimizer = _another(model) if another else optimizer
    _step(model, optimizer)
    with mcr.no_sync(model):
        model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def _part_wrapped() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mcr.wrap(model, optimizer)
    mcr.wrap(model[0], optimizer)
    _step(model, optimizer)


def _distributed_then_added() -> None:
    model, optimizer = _model()
    model.bias.requires_grad_(False)
    mcr.DistributedOptimizer(optimizer)
    model.bias.requires_grad_(True)
    _step(model, optimizer)


def _distributed_then(
    change: Callable[[Any, Any], None] | None = None, *, dropped: bool = False, skipped: bool = False
) -> None:
    """Train the model of a `DistributedOptimizer` with another optimizer; `dropped`: without the first."""
    model, optimizer = _model()
    mcr.broadcast_parameters(model)
    mcr.DistributedOptimizer(optimizer)
    _step(model, optimizer)
    if change is not None:
        change(model, optimizer)
    another = _another(model)
    if dropped:
        del optimizer
        gc.collect()
    if skipped:
        cast("Any", model.weight).mcr_skip = True
    for _ in range(2):
        another.zero_grad()
        model(torch.ones(1, 4) * (1 + mcr.get_rank())).sum().backward()
        another.step()
    state = [each.detach().clone() for each in model.parameters()]
    mcr.broadcast_parameters(model)
    assert skipped or all(map(torch.equal, state, model.parameters()))


def _step_within_backward_of_distributed(*, another: bool) -> None:
    model, optimizer = _model()
    mcr.DistributedOptimizer(optimizer)
    steps = _another(model) if another else optimizer
    hook = cast("torch.Tensor", model.weight).register_post_accumulate_grad_hook(lambda _: steps.step())
    try:
        model(torch.ones(1, 4)).sum().backward()
    finally:
        hook.remove()


def _first_step_while_frozen() -> None:
    model, _ = mcr.wrap(*_model())
    another = _another(model)
    model.requires_grad_(False)
    another.step()
    model.requires_grad_(True)
    with mcr.no_sync(model):
        _step(model, another)


def _lazy() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.LazyLinear(2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _horovod_with_another() -> None:
    hvd.init()
    try:
        model, optimizer = _model()
        hvd.DistributedOptimizer(optimizer)
        model(torch.ones(1, 4)).sum().backward()
        try:
            _another(model).step()
        finally:
            optimizer.step()
    finally:
        hvd.shutdown()


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
    try:
        _step(model, optimizer)
    finally:
        local.finish()


def _local_then_another(change: Callable[[Any, Any], None] | None = None) -> None:
    model, optimizer = _model()
    local = mcr.local(model, optimizer, every=2)
    if change is not None:
        change(model, optimizer)
    for _ in range(2):
        with suppress(mcr.McrError):
            _step(model, _another(model))
    _step(model, _another(model))
    assert local


def _elastic_without_with() -> None:
    model, optimizer = mcr.wrap(*_model())
    for _ in mcr.elastic(model, optimizer, steps=3):
        _step(model, optimizer)


def _elastic_unwrapped() -> None:
    model, optimizer = _model()
    for step in mcr.elastic(model, optimizer, steps=2):
        with step:
            _step(model, optimizer)


def _elastic_with_twice() -> None:
    model, optimizer = mcr.wrap(*_model())
    for step in mcr.elastic(model, optimizer, steps=2):
        with step:
            _step(model, optimizer)
        with step:
            _step(model, optimizer)


def _elastic_in_ddp() -> None:
    model, optimizer = _model()
    _elastic = mcr.elastic(_InDDP(model), optimizer, steps=2)


class _InDDP(torch.nn.Module):
    """A wrapper of a model, such as DistributedDataParallel."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


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
        "layer replaced, another optimizer": (_changed_with_another(_replaced), "'weight' was replaced"),
        "assigned, another optimizer": (_changed_with_another(_assigned), "'weight' was replaced"),
        "unfrozen, another optimizer": (
            _changed_with_another(_unfrozen, is_frozen=True),
            "or unfrozen; call",
        ),
        "replaced, in evaluation mode": (
            _changed_with_another(_replaced, by_forward=False),
            "'weight' was replaced",
        ),
        "assigned, in evaluation mode": (
            _changed_with_another(_assigned, by_forward=False),
            "'weight' was replaced",
        ),
        "part wrapped after the whole": (_part_wrapped, "call it on the whole model last"),
        "step within backward": (_step_within_backward, "step once backward() has returned"),
        "lazy module": (lambda: mcr.wrap(*_lazy()), "run a forward pass on all ranks first"),
        "local of a lazy module": (lambda: mcr.local(*_lazy()), "run a forward pass on all ranks first"),
        "DistributedOptimizer, then unfrozen": (
            _distributed_then_added,
            "added, replaced or unfrozen; call it",
        ),
        "DistributedOptimizer with parameters": (
            lambda: mcr.DistributedOptimizer(_model()[1], _model()[0].parameters()),  # type: ignore[arg-type]
            "as model.named_parameters() has them, got generator of Parameter",
        ),
        "DistributedOptimizer with a model": (
            lambda: mcr.DistributedOptimizer(*_model()[::-1]),  # type: ignore[arg-type]
            "got Linear",
        ),
        "first step while frozen, then in no_sync": (_first_step_while_frozen, "leave the block before"),
        "DistributedOptimizer, replaced, another": (
            lambda: _distributed_then(_replaced),
            "call mcr.DistributedOptimizer on it too",
        ),
        "DistributedOptimizer dropped, another": (
            lambda: _distributed_then(dropped=True),
            "call mcr.DistributedOptimizer on it too",
        ),
        "step within backward, distributed": (
            lambda: _step_within_backward_of_distributed(another=False),
            "step once backward() has returned",
        ),
        "step within backward of another": (
            lambda: _step_within_backward_of_distributed(another=True),
            "step once backward() has returned",
        ),
        "broadcast of parameters": (
            lambda: mcr.broadcast_parameters(_model()[0].parameters()),  # type: ignore[arg-type]
            "its named_parameters(), got generator of Parameter",
        ),
        "broadcast of a list": (
            lambda: mcr.broadcast_parameters([ones.view(2, 2)]),  # type: ignore[list-item]
            "got list of Tensor",
        ),
        "broadcast of an optimizer": (
            lambda: mcr.broadcast_parameters(_model()[1].state_dict()),
            "got a dict without tensors",
        ),
        "broadcast of an optimizer itself": (
            lambda: mcr.broadcast_parameters(_model()[1]),  # type: ignore[arg-type]
            "expected a module, its state_dict()",
        ),
        "record without with": (lambda: mcr.record().records, "`with mcr.record() as log:`"),  # type: ignore[attr-defined]
        "step in no_sync": (lambda: _step_in_no_sync(another=False), "leave the block before the last"),
        "step in no_sync of another": (lambda: _step_in_no_sync(another=True), "leave the block before"),
        "closure in no_sync": (lambda: _step_in_no_sync(another=False, closure=True), "leave the block"),
        "closure in no_sync of another": (
            lambda: _step_in_no_sync(another=True, closure=True),
            "leave the block before the last pass",
        ),
        "step after no_sync": (lambda: _step_after_no_sync(another=False), "leave the block before the last"),
        "step after no_sync of another": (
            lambda: _step_after_no_sync(another=True),
            "leave the block before",
        ),
        "optimizer of another model": (lambda: mcr.wrap(_model()[0], _model()[1]), "none of the model's"),
        "wrap without optimizer": (lambda: mcr.wrap(_model()[0], None), "expected a torch.optim"),  # type: ignore[type-var]
        "wrap swapped": (lambda: mcr.wrap(*_model()[::-1]), "expected a torch.nn.Module"),  # type: ignore[type-var]
        "no_sync before wrap": (lambda: mcr.no_sync(_model()[0]).__enter__(), "mcr.wrap has not been called"),
        "local then optimizer.step": (_local_then_step, "call local.step()"),
        "local of a wrapped model": (lambda: mcr.local(*mcr.wrap(*_model())), "averages gradients"),
        "another optimizer than Horovod's": (_horovod_with_another, "whose gradients are being reduced"),
        "local then another optimizer": (_local_then_another, "another optimizer (AdamW) of the model of"),
        "local, then assigned": (lambda: _local_then_another(_assigned), "another optimizer (AdamW) of the"),
        "elastic of a model alone": (_elastic_unwrapped, "call mcr.wrap(model, optimizer) first"),
        "elastic of a model in DDP": (_elastic_in_ddp, "without DistributedDataParallel around it"),
        "elastic with two blocks": (_elastic_with_twice, "put the whole step into one block"),
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


def _frozen_for_a_pass() -> None:
    """A discriminator's parameters are frozen while the generator is trained through it."""
    model, optimizer = mcr.wrap(*_model())
    _step(model, optimizer)
    generator, another = mcr.wrap(*_model())
    model.requires_grad_(False)
    model(generator(torch.ones(1, 4)).repeat(1, 2)).sum().backward()
    another.step()
    model.requires_grad_(True)
    _step(model, optimizer)


def _alternating() -> None:
    model, optimizer = mcr.wrap(*_model())
    another = torch.optim.SGD([cast("torch.Tensor", model.bias)], lr=0.1)
    model.weight.requires_grad_(False)
    _step(model, another)
    model.weight.requires_grad_(True)
    _step(model, optimizer)
    _step(model, another)


def _functional() -> None:
    model, optimizer = mcr.wrap(*_model())
    average = copy.deepcopy(model)
    with mcr.no_sync(model):
        _step(average, _another(average))
    torch.func.functional_call(model, dict(average.named_parameters()), torch.ones(1, 4)).sum().backward()
    torch.func.functional_call(
        model, {name: 2 * each for name, each in model.named_parameters()}, torch.ones(1, 4)
    ).sum().backward()
    optimizer.step()


def _distributed_after_wrap() -> None:
    model, optimizer = mcr.wrap(*_model())
    _step(model, optimizer)
    _replaced(model, optimizer)
    optimizer = mcr.DistributedOptimizer(_another(model))
    _step(model, optimizer)


def _distributed_and_another() -> None:
    _distributed_then()


def _distributed_and_skipped() -> None:
    _distributed_then(_replaced, skipped=True)


def _no_sync_of_a_compiled_model() -> None:
    model, optimizer = _model()
    compiled: Any = torch.compile(model, backend="eager")
    mcr.wrap(compiled, optimizer)
    with mcr.no_sync(compiled):
        compiled(torch.ones(1, 4)).sum().backward()
    _step(compiled, optimizer)


def _distributed_with_unused() -> None:
    model, optimizer = _model()
    mcr.DistributedOptimizer(optimizer)
    unused = torch.nn.Parameter(torch.ones(2))
    _step(model, torch.optim.SGD([*model.parameters(), unused], lr=0.1))


def _distributed_then_copy() -> None:
    model, optimizer = _model()
    mcr.DistributedOptimizer(optimizer)
    _step(model, optimizer)
    alone = copy.deepcopy(model)
    _step(alone, _another(alone))


def _local_then_wrap() -> None:
    model, optimizer = _model()
    local = mcr.local(model, optimizer, every=2)
    model, optimizer = mcr.wrap(model, _another(model))
    _step(model, optimizer)
    assert local


def _local_then_alone() -> None:
    model, optimizer = _model()
    local = mcr.local(model, optimizer, every=2)
    with suppress(mcr.InvalidArgument):
        _step(model, _another(model))
    another = _another(model)
    local.finish()
    del local
    _step(model, another)


def _accumulated() -> None:
    model, _ = mcr.wrap(*_model())
    another = _another(model)
    for _ in range(2):
        with mcr.no_sync(model):
            model(torch.ones(1, 4)).sum().backward()
        _step(model, another)


def _compiled_step() -> None:
    model, _ = mcr.wrap(*_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    torch.compile(optimizer.step, backend="eager")()


@mcr.record()  # type: ignore[operator]
def _recorded() -> None:
    mcr.all_reduce(torch.ones(2))


def _broadcast_module() -> None:
    model = torch.nn.Linear(4, 2)
    mcr.broadcast_parameters(model)
    mcr.broadcast_parameters(model.named_parameters())
    mcr.broadcast_parameters({})
    sums = model.weight.detach().clone()
    mcr.all_reduce(sums, mcr.MAX)
    assert sums.equal(model.weight)


def _dropped_in_no_sync() -> None:
    model, optimizer = mcr.wrap(*_model())
    with mcr.no_sync(model):
        model(torch.ones(1, 4)).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    _step(model, optimizer)


def _pruned() -> None:
    model, optimizer = mcr.wrap(*_model())
    prune.random_unstructured(model, "weight", 0.5)
    _step(model, _another(model))
    _step(model, optimizer)


RIGHT = (
    _dropped_in_no_sync, _pruned, _frozen_for_a_pass, _alternating, _functional, _distributed_after_wrap,
    _local_then_wrap, _no_sync_of_a_compiled_model, _distributed_with_unused, _distributed_and_another,
    _distributed_and_skipped, _distributed_then_copy, _local_then_alone, _accumulated, _compiled_step,
    _recorded, _broadcast_module,
)  # fmt: skip


def wrong_calls() -> dict[str, str]:
    """Run on ranks: make every call, and return the error of each."""
    said = {}
    with mcr.init() as comm:
        for right in RIGHT:
            right()
            comm.barrier()
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


def refused_in_a_group() -> tuple[str, float, float]:
    """Run on 3 ranks: rank 1 refuses a gather and ends; ranks 0 and 2 continue in a group of their own."""
    comm = mcr.init()
    group, others = mcr.new_group([2, 1]), mcr.new_group([0, 2])
    said, total = "nothing", torch.ones(1)
    try:
        if comm.rank:
            group.gather(torch.ones(2), [torch.ones(2)] * 2 if comm.rank == 1 else None, 1)
    except mcr.McrError as error:
        said = type(error).__name__
    if comm.rank != 1:
        for _ in range(20):
            others.all_reduce(total, mcr.AVG)
            time.sleep(0.02)
    begin = time.monotonic()
    mcr.finalize()
    return said, float(total), time.monotonic() - begin


def test_a_job_in_which_a_rank_has_refused_an_operation_ends_promptly() -> None:
    results = [result.value for result in run_ranks(refused_in_a_group, 3)]
    assert [said for said, _, _ in results] == ["nothing", "InvalidArgument", "BackendError"]
    assert {total for _, total, _ in results} == {1.0}
    assert max(seconds for _, _, seconds in results) < 10, results  # milliseconds on an idle machine


def unwaited() -> None:
    """Run on ranks: leave asynchronous operations; the message must name three."""
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
    """Run on ranks: operations complete without a `wait` by the program, or by layers above."""
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


def gradients_of_the_program() -> None:
    """Train with gradients that no backward pass has averaged, by `wrap` and by `DistributedOptimizer`."""
    with mcr.init() as comm:
        for named in (False, True):
            model, optimizer = _model()
            if named:
                mcr.broadcast_parameters(model)
                mcr.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
            else:
                mcr.wrap(model, optimizer)
            params = list(model.parameters())
            for _ in range(2):
                loss = model(torch.ones(1, 4) * (1 + comm.rank)).sum()
                for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                    param.grad = grad
                optimizer.step()
        _step(*mcr.wrap(*_model()))
        model, optimizer = mcr.wrap(*_model())
        for _ in range(2):  # changed means are means
            model(torch.ones(1, 4)).sum().backward()
            for param in model.parameters():
                param.grad = None if param.grad is None else param.grad.clamp(max=0.5)
            optimizer.step()


def test_gradients_that_no_pass_has_averaged_are_named_once() -> None:
    for result in run_ranks(gradients_of_the_program, 2):
        named = [line for line in result.stderr.splitlines() if "was set by the program" in line]
        assert [line.partition("'")[2].partition("'")[0] for line in named] == ["weight", "weight"]


def unfinished() -> None:
    """Leave `mcr.local` within a window, and another one at its end."""
    with mcr.init():
        model, optimizer = _model()
        local = mcr.local(model, optimizer, every=2)
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            local.step()
    with mcr.init():
        model, optimizer = _model()
        further = mcr.local(model, optimizer, every=3)
        model(torch.ones(1, 4)).sum().backward()
        further.step()


def test_steps_that_local_has_not_averaged_are_named_at_the_end() -> None:
    for result in run_ranks(unfinished, 2):
        assert result.stderr.count("end with local.finish()") == 1


def pull_of_nothing() -> str:
    """Run on ranks: pull from a source that ends without a push."""
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
