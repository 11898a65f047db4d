"""Bad arguments: refused on every rank alike, with a message that helps, and with nothing sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import RankResult, RanksFailed, run_ranks
from reference import Failures

import mcr_plus as mcr
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

TIMEOUT: Final = 20.0
WRONG: Final = mcr.InvalidArgument
UNSUPPORTED: Final = mcr.Unsupported
do: Final[Any] = mcr  # the tests break the annotations on purpose


@dataclass(frozen=True)
class Place:
    """The place of bad calls: this rank, a group of rank 0 alone, and valid tensors."""

    size: int
    rank: int
    strangers: mcr.Communicator

    def ones(self, *shape: int) -> torch.Tensor:
        return torch.ones(shape or (4,))

    def parts(self, *shape: int) -> list[torch.Tensor]:
        return [self.ones(*shape) for _ in range(self.size)]


class _Backwards:
    """Return an array with negative strides, which is refused before its memory is shared."""

    strides = (-8,)

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("shared with torch, which ends the process for negative strides")


Bad = tuple[str, Callable[[Place], Any], type[Exception], tuple[str, ...]]


def _tensors() -> list[Bad]:
    """Return bad calls with objects that are no tensors, and with tensors that cannot travel."""
    sparse = torch.eye(3).to_sparse()
    read_only = np.ones(3)
    read_only.setflags(write=False)
    return [
        ("a list", lambda p: do.all_reduce([1.0, 2.0]), WRONG, ("tensor", "DLPack", "list")),
        ("None", lambda p: do.broadcast(None, 0), WRONG, ("tensor", "NoneType")),
        ("a number", lambda p: do.isend(3, 0), WRONG, ("tensor", "int")),
        ("sparse", lambda p: do.all_reduce(sparse), UNSUPPORTED, ("tensor", "sparse", "strided")),
        (
            "sparse part",
            lambda p: do.all_gather([sparse] * p.size, p.ones()),
            UNSUPPORTED,
            ("tensor_list[0]",),
        ),
        (
            "meta",
            lambda p: do.all_reduce(torch.ones(3, device="meta")),
            UNSUPPORTED,
            ("tensor", "meta", "cpu, cuda"),
        ),
        (
            "meta output",
            lambda p: do.all_gather_into_tensor(torch.ones(4 * p.size, device="meta"), p.ones()),
            UNSUPPORTED,
            ("output", "meta"),
        ),
        (
            "unsigned 16",
            lambda p: do.all_reduce(torch.ones(3, dtype=torch.uint16)),
            UNSUPPORTED,
            ("SUM on uint16", "float32", "bool"),
        ),
        (
            "float8",
            lambda p: do.all_reduce(torch.ones(3).to(torch.float8_e4m3fn)),
            UNSUPPORTED,
            ("float8_e4m3fn", "bfloat16"),
        ),
        ("read-only array", lambda p: do.all_reduce(read_only), WRONG, ("tensor", "read-only")),
        (
            "negative strides",
            lambda p: do.all_reduce(_Backwards()),
            WRONG,
            ("tensor", "negative strides", "copy"),
        ),
        ("array of objects", lambda p: do.all_reduce(np.array([{}])), WRONG, ("tensor", "ndarray")),
        ("swapped bytes", lambda p: do.all_reduce(np.ones(3, dtype=">f4")), WRONG, ("tensor", "ndarray")),
        ("expanded", lambda p: do.all_reduce(torch.ones(1).expand(4)), WRONG, ("share memory", "contiguous")),
        (
            "expanded output",
            lambda p: do.all_to_all_single(torch.ones(1).expand(p.size), p.ones(p.size)),
            WRONG,
            ("share memory",),
        ),
    ]


def _shapes() -> list[Bad]:
    """Tensors and lists that do not fit each other."""
    return [
        (
            "output too small",
            lambda p: do.all_gather_into_tensor(p.ones(4 * p.size - 1), p.ones()),
            WRONG,
            ("output", "[4]", "×"),
        ),
        (
            "input too large",
            lambda p: do.reduce_scatter_tensor(p.ones(), p.ones(4 * p.size + 1)),
            WRONG,
            ("input", "[4]"),
        ),
        (
            "another dtype",
            lambda p: do.all_gather_into_tensor(p.ones(4 * p.size).double(), p.ones()),
            WRONG,
            ("output", "float64", "float32"),
        ),
        (
            "another dtype in a list",
            lambda p: do.reduce_scatter(p.ones(), [*p.parts()[1:], p.ones().int()]),
            WRONG,
            ("input_list[", "int32", "float32"),
        ),
        (
            "list too short",
            lambda p: do.all_gather(p.parts()[1:], p.ones()),
            WRONG,
            ("tensor_list", "one per rank", "got"),
        ),
        (
            "list too long",
            lambda p: do.all_to_all([*p.parts(), p.ones()], p.parts()),
            WRONG,
            ("output_list", "one per rank"),
        ),
        ("no list", lambda p: do.all_gather(p.ones(4 * p.size), p.ones()), WRONG, ("tensor_list", "Tensor")),
        (
            "parts of another size",
            lambda p: do.all_gather(p.parts(5), p.ones()),
            WRONG,
            ("tensor_list[0]", "[5]", "[4]"),
        ),
        (
            "own part of another size",
            lambda p: do.all_gather_v(p.parts(5), p.ones()),
            WRONG,
            ("tensor_list[",),
        ),
        (
            "uneven exchange",
            lambda p: do.all_to_all_single(p.ones(7), p.ones(8)),
            WRONG,
            ("output", "[7]", "[8]"),
        ),
        (
            "exchange that does not divide",
            lambda p: do.all_to_all_single(p.ones(p.size + 1), p.ones(p.size + 1)),
            WRONG,
            ("input", "divisible", "split sizes"),
        ),
        (
            "splits that do not sum",
            lambda p: do.all_to_all_single(p.ones(9), p.ones(9), [1] * p.size, [9] + [0] * (p.size - 1)),
            WRONG,
            ("output_split_sizes", "(9)", "sum"),
        ),
        (
            "too few splits",
            lambda p: do.all_to_all_single(p.ones(9), p.ones(9), None, [9][: p.size - 1]),
            WRONG,
            ("split",),
        ),
        (
            "negative split",
            lambda p: do.all_to_all_single(
                p.ones(9), p.ones(9), [10, -1, *[0] * (p.size - 2)], [9] + [0] * (p.size - 1)
            ),
            WRONG,
            ("output_split_sizes", "-1"),
        ),
        (
            "split that is no integer",
            lambda p: do.all_to_all_single(p.ones(p.size), p.ones(p.size), [1.5] * p.size, [1] * p.size),
            WRONG,
            ("output_split_sizes", "integers", "1.5"),
        ),
        (
            "splits that are no list",
            lambda p: do.all_to_all_single(p.ones(p.size), p.ones(p.size), "11", [1] * p.size),
            WRONG,
            ("output_split_sizes", "str"),
        ),
        (
            "rows of another width",
            lambda p: do.all_to_all_single(p.ones(p.size, 3), p.ones(p.size, 2), [1] * p.size, [1] * p.size),
            WRONG,
            ("output", "rows", "3]", "2]"),
        ),
        (
            "more outputs than inputs",
            lambda p: do.all_gather_coalesced([p.ones(4 * p.size)] * 2, [p.ones()]),
            WRONG,
            ("outputs", "(1)", "got 2"),
        ),
    ]


def _ranks_and_groups() -> list[Bad]:
    """Roots, peers and groups that are not there."""
    return [
        (
            "src too large",
            lambda p: do.broadcast(p.ones(), p.size),
            WRONG,
            ("src", "'world'", "its ranks: [0"),
        ),
        ("src negative", lambda p: do.broadcast(p.ones(), -1), WRONG, ("src", "-1")),
        ("dst as text", lambda p: do.reduce(p.ones(), "0"), WRONG, ("dst", "'0'")),
        ("dst as a truth value", lambda p: do.reduce(p.ones(), True), WRONG, ("dst", "True")),
        ("dst as a float", lambda p: do.gather(p.ones(), None, 0.0), WRONG, ("dst", "0.0")),
        ("src of scatter", lambda p: do.scatter(p.ones(), None, 99), WRONG, ("src", "99")),
        ("dst of send", lambda p: do.send(p.ones(), 99), WRONG, ("dst", "99")),
        ("src of recv", lambda p: do.recv(p.ones(), 99), WRONG, ("src", "99")),
        ("a function as object", lambda p: do.all_gather_object(lambda: 1), WRONG, ("function", "pickled")),
        ("object from nowhere", lambda p: do.broadcast_object({}, 99), WRONG, ("src", "99")),
        ("no list on the root", lambda p: do.gather(p.ones(), None, p.rank), WRONG, ("gather_list", "None")),
        (
            "no scatter_list on the root",
            lambda p: do.scatter_v(p.ones(), None, p.rank),
            WRONG,
            ("scatter_list",),
        ),
        (
            "group as text",
            lambda p: do.all_reduce(p.ones(), group="world"),
            WRONG,
            ("group", "Communicator", "'world'"),
        ),
        ("group as a number", lambda p: do.barrier(0), WRONG, ("group", "0")),
        (
            "group of a message",
            lambda p: do.batch_isend_irecv([do.P2POp(do.isend, p.ones(), 0, 0)]),
            WRONG,
            ("p2p_ops[0].group", "0"),
        ),
        ("ranks out of range", lambda p: do.new_group([0, 99]), WRONG, ("ranks", "99", "from 0 to")),
        ("ranks twice", lambda p: do.new_group([0, 0]), WRONG, ("ranks", "distinct", "[0, 0]")),
        ("no ranks", lambda p: do.new_group([]), WRONG, ("ranks", "at least one")),
        ("ranks as text", lambda p: do.new_group(["a"]), WRONG, ("ranks", "'a'")),
    ]


def _options() -> list[Bad]:
    """Reduce ops, backends, codecs, tags, and kinds of persistent operations."""
    return [
        (
            "mean of bool",
            lambda p: do.all_reduce(p.ones().bool(), "AVG"),
            UNSUPPORTED,
            ("AVG on bool", "float32"),
        ),
        (
            "bits of floats",
            lambda p: do.all_reduce(p.ones(), "BXOR"),
            UNSUPPORTED,
            ("BXOR", "float32", "bool"),
        ),
        (
            "order of complex",
            lambda p: do.reduce(p.ones().to(torch.complex64), 0, "MIN"),
            UNSUPPORTED,
            ("MIN", "complex64", "float64"),
        ),
        ("unknown op", lambda p: do.all_reduce(p.ones(), "sum"), WRONG, ("op", "'sum'", "SUM, AVG")),
        ("op None", lambda p: do.all_reduce(p.ones(), None), WRONG, ("op", "None", "SUM")),
        ("op as a list", lambda p: do.all_reduce(p.ones(), ["SUM"]), WRONG, ("op", "['SUM']", "MAX")),
        (
            "torch's other op",
            lambda p: do.all_reduce(p.ones(), dist.ReduceOp.PREMUL_SUM),
            WRONG,
            ("op", "PREMUL_SUM", "SUM"),
        ),
        (
            "backend that is not there",
            lambda p: do.all_reduce(p.ones(), backend="nccl"),
            UNSUPPORTED,
            ("nccl", "not part of this job", "gloo"),
        ),
        (
            "unknown backend",
            lambda p: do.barrier(backend="ncll"),
            UNSUPPORTED,
            ("ncll", "gloo", "mean 'nccl'"),
        ),
        ("backend as a number", lambda p: do.barrier(backend=5), WRONG, ("backend", "5")),
        (
            "backend as a list",
            lambda p: do.all_reduce(p.ones(), backend=["mpi"]),
            WRONG,
            ("backend", "['mpi']"),
        ),
        (
            "compress True",
            lambda p: do.all_reduce(p.ones(), compress=True),
            WRONG,
            ("compress", "True", "codec"),
        ),
        (
            "unknown codec",
            lambda p: do.all_reduce(p.ones(), compress="int9"),
            WRONG,
            ("int9", "bf16", "int8_block"),
        ),
        (
            "half the name of a codec",
            lambda p: do.all_reduce(p.ones(), compress="int8"),
            WRONG,
            ("int4_block", "did you mean 'int8_block'?"),
        ),
        (
            "unknown option",
            lambda p: do.all_reduce(p.ones(), compress={"codec": "bf16", "bits": 3}),
            WRONG,
            ("compress", "bits"),
        ),
        ("no codec", lambda p: do.broadcast(p.ones(), 0, compress={"bits": 3}), WRONG, ("compress", "bits")),
        ("empty mapping", lambda p: do.broadcast(p.ones(), 0, compress={}), WRONG, ("compress", "codec")),
        ("codec as a number", lambda p: do.all_reduce(p.ones(), compress=8), WRONG, ("compress", "8")),
        (
            "keys of no kind",
            lambda p: do.all_reduce(p.ones(), compress={1: 2, "a": 3}),
            WRONG,
            ("compress", "1"),
        ),
        (
            "codec for integers",
            lambda p: do.all_reduce(p.ones().int(), compress="bf16"),
            UNSUPPORTED,
            ("bf16", "int32", "float32"),
        ),
        (
            "codec for a maximum",
            lambda p: do.all_reduce(p.ones(), "MAX", compress="fp16"),
            UNSUPPORTED,
            ("fp16", "MAX", "SUM, AVG"),
        ),
        ("tag as a number", lambda p: do.all_reduce(p.ones(), tag=5), WRONG, ("tag", "5", "string")),
        ("tag as a list", lambda p: do.all_reduce(p.ones(), tag=["a"]), WRONG, ("tag", "['a']")),
        (
            "tag of a message as text",
            lambda p: do.isend(p.ones(), 0, tag="a"),
            WRONG,
            ("tag", "'a'", "label"),
        ),
        ("negative tag", lambda p: do.irecv(p.ones(), 0, tag=-1), WRONG, ("tag", "-1", "from 0")),
        ("tag too large", lambda p: do.send(p.ones(), 0, tag=2**24), WRONG, ("tag", str(2**24))),
        ("label as a number", lambda p: do.isend(p.ones(), 0, label=5), WRONG, ("5", "string")),
        (
            "no persistent form",
            lambda p: do.persistent("gather", p.ones()),
            WRONG,
            ("kind", "'gather'", "barrier"),
        ),
        (
            "misspelt persistent form",
            lambda p: do.persistent("all_redcue", p.ones()),
            WRONG,
            ("kind", "did you mean 'all_reduce'?"),
        ),
        (
            "persistent and asynchronous",
            lambda p: do.persistent("barrier", async_op=True),
            WRONG,
            ("async_op", "start"),
        ),
        (
            "persistent and not contiguous",
            lambda p: do.persistent("all_reduce", p.ones(4, 2).t()),
            WRONG,
            ("tensors[0]", "contiguous"),
        ),
        (
            "persistent of unknown op",
            lambda p: do.persistent("all_reduce", p.ones(), op="MEAN"),
            WRONG,
            ("op", "'MEAN'"),
        ),
    ]


def _several() -> list[Bad]:
    """Return calls of several operations with a bad later one: the earlier ones must not be sent either."""
    return [
        ("later tensor", lambda p: do.all_reduce_coalesced([p.ones(), None]), WRONG, ("tensor", "NoneType")),
        (
            "later dtype",
            lambda p: do.all_reduce_coalesced([p.ones(), p.ones().bool()], "AVG"),
            UNSUPPORTED,
            ("AVG", "bool"),
        ),
        (
            "later pair",
            lambda p: do.reduce_scatter_coalesced([p.ones(), p.ones()], [p.ones(4 * p.size), p.ones(3)]),
            WRONG,
            ("input", "[3]"),
        ),
        (
            "tensors that are no list",
            lambda p: do.all_reduce_coalesced(p.ones(2, 2)),
            WRONG,
            ("tensors", "Tensor"),
        ),
        (
            "later message",
            lambda p: do.batch_isend_irecv(
                [do.P2POp(do.isend, p.ones(), 0), do.P2POp(do.irecv, p.ones(), 99)]
            ),
            WRONG,
            ("src", "99"),
        ),
        (
            "no message",
            lambda p: do.batch_isend_irecv([do.P2POp(do.isend, p.ones(), 0), do.P2POp(do.send, p.ones(), 0)]),
            WRONG,
            ("p2p_ops[1]", "isend"),
        ),
        (
            "no P2POp",
            lambda p: do.batch_isend_irecv([do.P2POp(do.isend, p.ones(), 0), (do.isend, p.ones(), 0)]),
            WRONG,
            ("p2p_ops[1]", "P2POp", "tuple"),
        ),
    ]


def _strangers() -> list[Bad]:
    """Every operation on a group that this rank is not in; `strangers` has rank 0 alone."""
    calls: dict[str, Callable[[Place], Any]] = {
        "all_reduce": lambda p: p.strangers.all_reduce(p.ones()),
        "broadcast": lambda p: p.strangers.broadcast(p.ones(), 0),
        "reduce": lambda p: p.strangers.reduce(p.ones(), 0),
        "all_gather": lambda p: p.strangers.all_gather([p.ones()], p.ones()),
        "all_gather_into_tensor": lambda p: p.strangers.all_gather_into_tensor(p.ones(), p.ones()),
        "all_gather_v": lambda p: p.strangers.all_gather_v([p.ones()], p.ones()),
        "reduce_scatter": lambda p: p.strangers.reduce_scatter(p.ones(), [p.ones()]),
        "all_to_all": lambda p: p.strangers.all_to_all([p.ones()], [p.ones()]),
        "all_to_all_single": lambda p: p.strangers.all_to_all_single(p.ones(), p.ones()),
        "gather": lambda p: p.strangers.gather(p.ones(), None, 0),
        "scatter": lambda p: p.strangers.scatter(p.ones(), None, 0),
        "isend": lambda p: p.strangers.isend(p.ones(), 0),
        "irecv": lambda p: p.strangers.irecv(p.ones()),
        "barrier": lambda p: p.strangers.barrier(),
        "broadcast_object": lambda p: p.strangers.broadcast_object({}, 0),
        "all_gather_object": lambda p: p.strangers.all_gather_object({}),
        "split": lambda p: p.strangers.split(0),
        "persistent": lambda p: p.strangers.persistent("barrier"),
        "coalesced": lambda p: p.strangers.all_reduce_coalesced([p.ones()]),
    }
    return [
        (f"{name} of strangers", call, UNSUPPORTED, ("not a member", "group1", "[0]"))
        for name, call in calls.items()
    ]


# -- on the ranks -------------------------------------------------------------------------------------


def refused() -> dict[str, Any]:
    """Make every bad call; after each, a good one must work and have the next number."""
    failures = Failures()
    said: dict[str, str] = {}
    with mcr.init(timeout=TIMEOUT) as comm:
        place = Place(comm.size, comm.rank, mcr.new_group([0]))
        bad = [*_tensors(), *_shapes(), *_ranks_and_groups(), *_options(), *_several()]
        if comm.rank > 0:
            bad += _strangers()
        number = _good(comm, "before", failures)
        for name, call, kind, fragments in bad:
            said[name] = failures.raises(name, lambda call=call: call(place), kind, *fragments)  # type: ignore[misc]
            if comm.rank == 0 or name not in {entry[0] for entry in _strangers()}:
                after = _good(comm, name, failures)
                failures.expect(f"{name}: nothing was sent", after == number + 1, (number, after))
                number = after
        comm.barrier()
    return {**failures.report(), "said": said}


def _good(comm: mcr.Communicator, name: str, failures: Failures) -> int:
    """Return a correct operation; its number."""
    tensor = torch.tensor([float(comm.rank + 1)])
    work = comm.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    failures.expect(f"an operation after {name}", float(tensor) == comm.size * (comm.size + 1) / 2, tensor)
    return work.info.sequence


def lives() -> dict[str, Any]:
    """Wrong order of init, operations and finalize; backends that cannot be had."""
    failures = Failures()
    missing, wrong = mcr.NotInitialized, failures.raises
    for name, call in _before_init().items():
        wrong(f"{name} before init", call, missing, "mcr.init")
    wrong("finalize before init", mcr.finalize, missing, "mcr.init")
    comm = mcr.init(timeout=TIMEOUT)
    wrong("init twice", mcr.init, mcr.AlreadyInitialized, "finalize")
    failures.expect("the first init goes on", mcr.world() is comm)
    operation = mcr.persistent("barrier")
    operation()
    group = mcr.new_group([comm.size - 1, *range(comm.size - 1)])
    number = _good(comm, "init twice", failures)
    failures.expect("numbers go on", number > 0)
    mcr.finalize()
    mcr.finalize()
    failures.expect("a second finalize is harmless", not mcr.is_initialized())
    for name, call in _before_init().items():
        wrong(f"{name} after finalize", call, missing, "finalize")
    wrong("method after finalize", lambda: comm.all_reduce(torch.ones(1)), missing, "finalize")
    wrong("group after finalize", group.barrier, missing, "finalize")
    wrong("persistent after finalize", operation, missing, "finalize")

    found = mcr.BackendUnavailable
    if not torch.cuda.is_available() and comm.size > 1:
        wrong(
            "backend that cannot run here",
            lambda: mcr.init(backends=["nccl"], timeout=TIMEOUT),
            found,
            "nccl",
        )
    wrong("unknown backend", lambda: mcr.init(backends=["ncll"]), mcr.ConfigError, "ncll", "gloo", "mpi")
    wrong("no backend", lambda: mcr.init(backends=[]), mcr.ConfigError, "backends")
    wrong("backends as text", lambda: mcr.init(backends="mpi"), mcr.ConfigError, "backends", "gloo")
    failures.expect("not initialised after a failed init", not mcr.is_initialized())

    with mcr.init(timeout=TIMEOUT) as second:
        wrong("the first job's group in the second", comm.barrier, missing, "finalize")
        _good(second, "all failed inits", failures)
    return failures.report()


def _before_init() -> dict[str, Callable[[], Any]]:
    return {
        "all_reduce": lambda: mcr.all_reduce(torch.ones(1)),
        "barrier": mcr.barrier,
        "isend": lambda: mcr.isend(torch.ones(1), 0),
        "world": mcr.world,
        "get_rank": mcr.get_rank,
        "get_world_size": mcr.get_world_size,
        "get_backends": mcr.get_backends,
        "new_group": lambda: mcr.new_group([0]),
        "persistent": lambda: mcr.persistent("barrier"),
        "record": lambda: mcr.record().__enter__(),
    }


def both() -> dict[str, Any]:
    """Everything on one launch."""
    return {"lives": lives(), "refused": refused()}


# -- the tests ----------------------------------------------------------------------------------------

LAUNCHES: Final = {"two ranks": ("mpi" if mpi_usable() else "torch", 2), "three ranks": ("torch", 3)}


@cache
def launched(launch: str) -> list[RankResult] | RanksFailed:
    """Return the findings of a launch's ranks, or their failures; each launch runs once."""
    via, ranks = LAUNCHES[launch]
    try:
        return run_ranks("jobs.operations.test_arguments:both", ranks, via=via)  # type: ignore[arg-type]
    except RanksFailed as failure:
        return failure


def found(launch: str) -> list[RankResult]:
    """Return the findings of a launch's ranks."""
    results = launched(launch)
    if isinstance(results, RanksFailed):
        raise results
    return results


@pytest.mark.short("two ranks")
@pytest.mark.parametrize("launch", LAUNCHES)
def test_bad_arguments_are_refused_with_nothing_sent(launch: str) -> None:
    for result in found(launch):
        report = result.value["refused"]
        assert report["failures"] == [], f"rank {result.rank}: {report['failed']} of {report['cases']}"
        assert report["cases"] >= 250


@pytest.mark.short("two ranks")
@pytest.mark.parametrize("launch", LAUNCHES)
def test_bad_arguments_are_refused_alike_on_every_rank(launch: str) -> None:
    first, *others = (result.value["refused"]["said"] for result in found(launch))
    for other in others:
        differing = {name for name in first if first[name].split(":")[0] != other[name].split(":")[0]}
        assert not differing


@pytest.mark.short("two ranks")
@pytest.mark.parametrize("launch", LAUNCHES)
def test_init_and_finalize_in_the_wrong_order_are_refused(launch: str) -> None:
    for result in found(launch):
        report = result.value["lives"]
        assert report["failures"] == [], f"rank {result.rank}: {report['failed']} of {report['cases']}"
        assert report["cases"] >= 35


def test_invalid_arguments_are_value_errors_too() -> None:
    assert issubclass(mcr.InvalidArgument, ValueError)
    assert issubclass(mcr.InvalidArgument, mcr.Unsupported)
    assert issubclass(mcr.Unsupported, mcr.McrError)
