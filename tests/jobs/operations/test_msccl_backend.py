"""The backend `msccl` in a job: algorithms by name and from files, sizes that do not fit, its thread."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msccl_samples as samples
import pytest
import torch
from command import mcr_plus
from ranks import run_ranks, wait_for_files

import mcr_plus as mcr
from mcr_plus import msccl
from mcr_plus.backends.shm.queue import WorkQueue
from mcr_plus.core.group import Group
from mcr_plus.core.message import Signature
from mcr_plus.errors import ConfigError
from mcr_plus.job.init import current
from mcr_plus.msccl import catalog
from mcr_plus.msccl.generators import GENERATORS
from mcr_plus.msccl.writer import write_algorithm
from mcr_plus.rendezvous.world import World

COUNTS = (1, 5, 1031, 70_001)  # elements of a rank's block
Check = Callable[[torch.Tensor, torch.Tensor, str], None]


# -- its other name ---------------------------------------------------------------------------------


def either_name(table: str) -> list[str]:
    """Return the libraries of calls with `shm` on one rank and `msccl` on the other."""
    name = "shm" if os.environ["RANK"] == "0" else "msccl"
    config = {
        "version": 1,
        "pipeline": [{"fuse": {}}, {"select": {"table": table}}, {"dispatch": {"check": "every"}}],
        "rules": [{"match": {"kind": "broadcast"}, "backend": f"{name}:tree"}],
    }
    comm = mcr.init(config, backends=[name, "gloo"])
    peer = 1 - comm.rank
    value, got, found = torch.full((64,), comm.rank + 1.0), torch.zeros(64), [*mcr.get_backends()]
    for choice in (name, f"{name}:ring", None):
        work = mcr.all_reduce(value, async_op=True, backend=choice)
        assert work is not None
        work.wait()
        found.append(work.info.backend)
    work = mcr.broadcast(value, src=0, async_op=True)
    assert work is not None
    work.wait()
    found.append(work.info.backend)
    mcr.persistent("all_reduce", value, backend=name)()
    mcr.all_reduce_coalesced([value, got], backend=name)
    sent = mcr.isend(value, peer, backend=name)
    mcr.recv(got, peer, backend=name)
    sent.wait()
    assert torch.equal(value, got)
    mcr.finalize()
    return found


def test_shm_is_another_name_of_msccl(tmp_path: Path) -> None:
    table = tmp_path / "table.yaml"
    table.write_text("version: 1\nrules: [{kind: all_reduce, bytes: 0.., backend: shm}]\n")
    for result in run_ranks(either_name, 2, args=[str(table)], via="torch"):
        assert result.value == [
            "msccl", "gloo", "msccl", "msccl:ring", "msccl", "msccl:tree",
        ]  # fmt: skip


# -- algorithms by name -----------------------------------------------------------------------------


def every_algorithm() -> list[str]:
    """Every generated algorithm through the pipeline, of every root, in place or not, sync and async."""
    comm = mcr.init({"version": 1, "backends": ["msccl"]})
    problems: list[str] = []

    def check(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        if not torch.equal(found, wanted):
            problems.append(f"{what}: {found[:4].tolist()} instead of {wanted[:4].tolist()}")

    names = {kind: list(catalog._generated(kind)) for kind in catalog.COLLECTIVES}
    assert sum(map(len, names.values())) == len(GENERATORS)
    for count in COUNTS:
        for kind, algorithms in names.items():
            for number, algorithm in enumerate(algorithms):
                options = {"backend": f"msccl:{algorithm}", "async_op": bool((count + number) % 2)}
                Case(comm, kind, count, options, check).run()
    mcr.finalize()
    return problems


class Case:
    """One algorithm on blocks of `count` elements."""

    def __init__(
        self, comm: mcr.Communicator, kind: str, count: int, options: dict[str, Any], check: Check
    ) -> None:
        self.comm, self.kind, self.count, self.options, self.check = comm, kind, count, options, check
        self.me, self.ranks = comm.rank, range(comm.size)
        self.base = torch.arange(count, dtype=torch.float64) % 13
        self.total = sum((self.base + rank for rank in self.ranks), torch.zeros_like(self.base))
        self.what = f"{kind} {options['backend']} of {count}"

    def go(self, name: str, *args: Any) -> None:
        work = getattr(self.comm, name)(*args, **self.options)
        if work is not None:
            work.wait()

    def becomes(self, found: torch.Tensor, wanted: torch.Tensor) -> None:
        self.check(found, wanted, self.what)

    def blocks(self, rank: int) -> torch.Tensor:
        """Return the elements of `rank` for each rank."""
        return torch.cat([self.base + 100 * other + rank for other in self.ranks])

    def run(self) -> None:
        getattr(self, self.kind)()

    def all_reduce(self) -> None:
        size = len(self.ranks)
        wanted = {"SUM": self.total, "AVG": self.total / size, "MAX": self.base + size - 1}
        for op, result in wanted.items():
            value = self.base + self.me
            self.go("all_reduce", value, op)
            self.becomes(value, result)

    def all_gather(self) -> None:
        for in_place in (False, True):
            output, own = torch.cat([torch.zeros_like(self.base)] * len(self.ranks)), self.base + self.me
            if in_place:
                own = output[self.me * self.count : (self.me + 1) * self.count].copy_(own)
            self.go("all_gather_into_tensor", output, own)
            self.becomes(output, torch.cat([self.base + rank for rank in self.ranks]))

    def reduce_scatter(self) -> None:
        for in_place in (False, True):
            source, output = self.blocks(self.me), torch.zeros_like(self.base)
            if in_place:
                output = source[self.me * self.count : (self.me + 1) * self.count]
            self.go("reduce_scatter_tensor", output, source)
            self.becomes(output, self.total + 100 * self.me * len(self.ranks))

    def all_to_all(self) -> None:
        output = torch.zeros(self.count * len(self.ranks), dtype=torch.float64)
        self.go("all_to_all_single", output, self.blocks(self.me))
        self.becomes(output, torch.cat([self.base + 100 * self.me + rank for rank in self.ranks]))

    def broadcast(self) -> None:
        for root in self.ranks:
            value = self.base + self.me
            self.go("broadcast", value, root)
            self.becomes(value, self.base + root)

    def reduce(self) -> None:
        for root in self.ranks:
            value = self.base + self.me
            self.go("reduce", value, root)
            self.becomes(value, self.total if self.me == root else self.base + self.me)

    def gather(self) -> None:
        for root in self.ranks:
            parts = [torch.zeros_like(self.base) for _ in self.ranks] if self.me == root else None
            self.go("gather", self.base + self.me, parts, root)
            for rank, part in enumerate(parts or ()):
                self.becomes(part, self.base + rank)

    def scatter(self) -> None:
        for root in self.ranks:
            value, mine = torch.zeros_like(self.base), self.me == root
            parts = [self.base + 10 * rank + root for rank in self.ranks] if mine else None
            self.go("scatter", value, parts, root)
            self.becomes(value, self.base + 10 * self.me + root)


@pytest.mark.short("2")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_algorithm_by_name(ranks: int) -> None:
    for result in run_ranks(every_algorithm, ranks, via="torch", timeout=180):
        assert result.value == []


# -- algorithms from files --------------------------------------------------------------------------


def from_files(folder: str) -> list[Any]:
    """Algorithms of a folder: called by name, chosen by a rule and by a table, refused."""
    table = {
        "version": 1,
        "fingerprint": {},
        "rules": [{"kind": "all_gather", "bytes": "0..", "backend": "msccl:gathering"}],
    }
    Path(folder, "table.yaml").write_text(json.dumps(table))
    comm = mcr.init(
        {
            "version": 1,
            "backends": ["msccl"],
            "algorithms": [folder],
            "pipeline": [{"select": {"table": f"{folder}/table.yaml"}}, {"dispatch": {}}],
            "rules": [{"match": {"tag": "mine"}, "backend": "msccl:chain"}],
        }
    )
    me, told = comm.rank, []

    def refused(call: Callable[[], object]) -> None:
        try:
            call()
        except mcr.Unsupported as error:
            told.append(str(error))

    with mcr.record() as log:
        value = torch.full((3000,), float(me + 1))
        comm.all_reduce(value, backend="msccl:ring-of-mine")
        assert bool((value == 6).all())
        comm.broadcast(value.fill_(me), 1, tag="mine")
        assert bool((value == 1).all())
        gathered = torch.empty(9)
        comm.all_gather_into_tensor(gathered, torch.full((3,), float(me)))
        assert gathered.tolist() == [0.0] * 3 + [1.0] * 3 + [2.0] * 3
    refused(lambda: comm.broadcast(value, 0, tag="mine"))
    refused(lambda: comm.all_reduce(torch.ones(10), backend="msccl:ring-of-mine"))
    refused(lambda: comm.all_reduce(value, backend="msccl:gathering"))
    refused(lambda: comm.all_to_all_single(torch.ones(3), torch.ones(3), backend="msccl:nothing"))
    refused(lambda: comm.barrier(backend="msccl:ring"))
    for name in ("of-two", "all_reduce_ring", "ring-of-mine.xml", ""):
        refused(lambda name=name: comm.all_reduce(value, backend=f"msccl:{name}"))  # type: ignore[misc]
    backends = [record.backend for record in log.records]
    mcr.finalize()
    return [told, backends]


def test_algorithms_from_files(tmp_path: Path) -> None:
    ring = samples.ring(3)
    for name, algorithm in {
        "ring-of-mine": type(ring)(**{**vars(ring), "least": 1000, "most": 20_000}),
        "chain": samples.chain(3, 1),
        "gathering": samples.gathering(3),
        "of-two": samples.ring(2),
    }.items():
        write_algorithm(algorithm, tmp_path / f"{name}.xml")
    for result in run_ranks(from_files, 3, args=[str(tmp_path)], via="torch"):
        told, backends = result.value
        assert set(backends) == {"msccl:ring-of-mine", "msccl:chain", "msccl:gathering"}
        root, size, kind, unknown, none, ranks, generator, file, empty = told
        assert "algorithm 'chain' has root 1" in root
        assert "algorithm 'ring-of-mine' is for 1000 B to 20000 B" in size
        assert "ring-of-mine.xml" in size
        assert "algorithm 'gathering' is for all_gather on 3 ranks" in kind
        assert "gathering.xml" in kind
        assert "no algorithm 'nothing' for all_to_all on 3 ranks; known: direct, two_level" in unknown
        assert "barrier has no algorithms" in none
        assert "algorithm 'of-two' is for all_reduce on 2 ranks" in ranks
        assert "did you mean 'ring'?" in generator
        assert "did you mean 'ring-of-mine'?" in file
        assert "backend 'msccl:' names no algorithm" in empty


def test_algorithm_files_are_checked_at_init(tmp_path: Path) -> None:
    write_algorithm(samples.ring(2), tmp_path / "mine.xml")
    text = (tmp_path / "mine.xml").read_text()
    (tmp_path / "wrong").mkdir()
    wrong = tmp_path / "wrong" / "wrong.xml"
    wrong.write_text(text.replace('type="rrcs"', 'type="rcs"', 1))
    assert wrong.read_text() != text
    pipeline = tmp_path / "pipeline.yaml"
    for given, message in (
        ("[wrong/wrong.xml]", "wrong.xml"),
        ("[missing]", "pipeline.yaml:2: algorithms[0]: no algorithm file, or folder with *.xml, 'missing'"),
        ("[3]", "pipeline.yaml:2: algorithms[0]: expected the path of an algorithm file"),
        ("mine.xml", "pipeline.yaml:2: algorithms: expected a list"),
        ("[mine.xml, mine.xml]", "a file of the same name is there already"),
    ):
        pipeline.write_text(f"version: 1\nalgorithms: {given}\n")
        result = mcr_plus("validate", str(pipeline))
        assert result.returncode == 2, result.stderr
        assert message in result.stderr.replace("\n", " "), result.stderr
    pipeline.write_text("version: 1\nalgorithms: [mine.xml]\n")
    assert "mine.xml" in mcr_plus("validate", str(pipeline)).stdout
    write_algorithm(samples.ring(2), tmp_path / "ring.xml")
    with pytest.raises(ConfigError, match="the name of an algorithm of our own"):
        catalog.use([tmp_path / "ring.xml"])


UNKNOWN = {  # value in the configuration: place of the refusal
    "rules: [{match: {kind: all_reduce}, backend: 'msccl:mine.xml'}]": (
        "pipeline.yaml:3: rules[0].backend: backend 'msccl:mine.xml': unknown algorithm 'mine.xml'; known: ",
        ", mine; did you mean 'mine'?",
    ),
    "pipeline: [{hierarchical: {inter: {backend: 'msccl:nope'}}}, {select: {}}, {dispatch: {}}]": (
        "pipeline.yaml:3: hierarchical.inter.backend: backend 'msccl:nope': unknown algorithm 'nope'",
        "add the file to `algorithms:`",
    ),
    "pipeline: [{select: {table: table.yaml}}, {dispatch: {}}]": (
        "table.yaml:4: backend 'msccl:nope': unknown algorithm 'nope'",
        "add the file to `algorithms:`",
    ),
    "backends: ['msccl:ring', gloo]": (
        "pipeline.yaml:3: backends[0]: expected a backend without an algorithm, got 'msccl:ring'",
        "rules and calls name algorithms",
    ),
}


@pytest.mark.parametrize("text", UNKNOWN)
def test_unknown_algorithm_names_are_refused_at_load(tmp_path: Path, text: str) -> None:
    write_algorithm(samples.ring(2), tmp_path / "mine.xml")
    rules = "\n- {kind: all_gather, bytes: 0.., backend: 'msccl:mine'}"
    rules += "\n- {kind: all_reduce, bytes: 0.., backend: 'msccl:nope'}"
    (tmp_path / "table.yaml").write_text(f"version: 1\nrules:{rules}\n")
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text(f"version: 1\nalgorithms: [mine.xml]\n{text}\n")
    told = " ".join(mcr_plus("validate", str(pipeline)).stderr.split())
    assert all(part in told for part in UNKNOWN[text]), told
    with catalog.kept(), pytest.raises(ConfigError):
        mcr.init(pipeline)


def test_algorithm_files_are_part_of_the_configuration_hash(tmp_path: Path) -> None:
    from mcr_plus.config.reader import fingerprint, load

    write_algorithm(samples.ring(2), tmp_path / "mine.xml")
    given = {"version": 1, "algorithms": [str(tmp_path)]}
    before = fingerprint(load(given))
    assert before == fingerprint(load(given)) != fingerprint(load({"version": 1}))
    write_algorithm(samples.all_pairs(2), tmp_path / "mine.xml")
    assert fingerprint(load(given)) != before


# -- sizes, threads, places -------------------------------------------------------------------------


def sizes_that_do_not_fit() -> list[Any]:
    """Rank 1 expects more values than rank 0 has, in a later call: only first calls are compared."""
    comm = mcr.init({"version": 1, "backends": ["msccl"]})
    sent, expected = ([2, 5], [2, 4]) if comm.rank == 0 else ([4, 1], [5, 1])
    for more in (0, comm.rank):
        source, target = torch.arange(float(sum(sent))), torch.zeros(sum(expected) + more)
        try:
            comm.all_to_all_single(target, source, [expected[0] + more, expected[1]], sent)
        except mcr.OrderMismatch as error:
            return [str(error), bool((target == 0).all())]
    return target.tolist()


def test_sizes_that_do_not_fit() -> None:
    right, wrong = run_ranks(sizes_that_do_not_fit, 2, via="torch", check=False)
    assert right.value == [0.0, 1.0, 0.0, 1.0, 2.0, 3.0]
    assert re.search(
        r"operation #\d+ of .*rank 0 sends \d elements to rank 1, which expects 6", wrong.value[0]
    )
    assert wrong.value[1]


def on_the_thread() -> list[bool]:
    """Test asynchronous operations, waited for in another order, and the thread's leftovers."""
    comm = mcr.init({"version": 1, "backends": ["msccl"]})
    me, size = comm.rank, comm.size
    total = size * (size - 1) // 2
    found = []
    for count in (3_000_001, 17, 900_000):
        values = [torch.full((count + index,), me, dtype=torch.int32) for index in range(5)]
        works = [comm.all_reduce(value, async_op=True) for value in values]
        small = torch.full((3,), me)
        comm.all_reduce(small)  # after the large ones
        large = torch.full((size * 400_000,), me)
        everything = torch.empty_like(large)
        comm.all_to_all_single(everything, large)
        for work in reversed(works):
            assert work is not None
            work.wait(30)
        found += [bool((value == total).all()) for value in [*values, small]]
        found.append(everything.view(size, -1)[:, 0].tolist() == list(range(size)))
    mcr.finalize()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_large_asynchronous_operations(ranks: int) -> None:
    for result in run_ranks(on_the_thread, ranks, via="torch"):
        assert result.value == [True] * 21


def interrupted(folder: str) -> list[bool]:
    """Rank 0 stops waiting and drops its tensor while rank 1 is late; the operation still completes."""
    comm = mcr.init({"version": 1, "backends": ["msccl"]})
    mcr.all_reduce(torch.ones(3_000_000))
    mcr.barrier()
    stopped, waits = Path(folder, "stopped"), current().engine.waits

    def strike(*_: object) -> None:
        if waits:
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, 0.05)  # it does not wait yet

    if comm.rank == 0:
        signal.signal(signal.SIGALRM, strike)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            comm.all_reduce(torch.ones(3_000_000))
        except KeyboardInterrupt:
            stopped.touch()
        else:
            return [False]
    else:
        wait_for_files(stopped)
        comm.all_reduce(torch.ones(3_000_000))
    fresh = [torch.full((1_000_000,), 7.0) for _ in range(6)]  # its memory, if it is free
    value = torch.full((5,), float(comm.rank))
    comm.all_reduce(value)
    mcr.finalize()
    return [value.tolist() == [1.0] * 5, *(bool((each == 7).all()) for each in fresh)]


def test_an_interrupted_wait_keeps_its_tensors(tmp_path: Path) -> None:
    for result in run_ranks(interrupted, 2, args=[str(tmp_path)], via="torch"):
        assert all(result.value)


def other_sizes(backend: str) -> str:
    """Both sizes have been compared before; then ranks take different ones."""
    comm = mcr.init(
        {"version": 1, "backends": ["msccl"], "pipeline": [{"select": {}}, {"dispatch": {"timeout": "20s"}}]}
    )
    for count in (1000, 400_000):
        comm.all_reduce(torch.ones(count), backend=backend)
    try:
        for count in ((1000, 1000), (400_000, 1000))[comm.rank]:
            comm.all_reduce(torch.ones(count), backend=backend)
    except mcr.OrderMismatch as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("backend", ["msccl", "msccl:ring"])
def test_other_sizes_raise_and_are_never_summed(backend: str) -> None:
    for result in run_ranks(other_sizes, 2, args=[backend], via="torch", check=False):
        assert "float32[1000]" in str(result.value)
        assert "float32[400000]" in str(result.value)


def other_order() -> tuple[str, float]:
    """The root of a tree waits for no peer, so no peer would read the description of its operation.

    Returns the error and the seconds until it was raised.
    """
    stages = [{"select": {}}, {"dispatch": {"timeout": "20s"}}]
    comm = mcr.init({"version": 1, "backends": ["msccl"], "pipeline": stages})
    first, second = torch.zeros(100), torch.zeros(200)
    for value in (first, second):
        comm.broadcast(value, 0, backend="msccl:tree")
    start = time.monotonic()
    try:
        for value in ((first, second), (second, first))[comm.rank]:
            comm.broadcast(value, 0, backend="msccl:tree")
        comm.barrier()
    except mcr.OrderMismatch as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


def test_another_order_raises_in_one_sided_data_flow() -> None:
    root, other = (result.value for result in run_ranks(other_order, 2, via="torch", check=False))
    assert "broadcast float32[200]" in other[0]
    assert "rank 0 has issued another operation in its place" in other[0]
    assert "rank 1 has given up" in root[0]
    assert max(seconds for _, seconds in (root, other)) < 15, "long before the deadline"


def dealt(file: str) -> list[bool]:
    """Numbers of elements that two chunks do not divide, on ranks that have no input."""
    found = []
    with mcr.init({"version": 1, "backends": ["msccl"], "algorithms": [file]}) as comm:
        for count in (1, 2, 5, 1001):
            parts = [torch.arange(count) + 100.0 * rank for rank in range(comm.size)]
            out = torch.zeros(count)
            comm.scatter(out, parts if comm.rank == 0 else None, 0, backend="msccl:dealing")
            found.append(torch.equal(out, parts[comm.rank]))
    return found


def test_a_scatter_of_several_chunks(tmp_path: Path) -> None:
    write_algorithm(samples.dealing(3), tmp_path / "dealing.xml")
    for result in run_ranks(dealt, 3, args=[str(tmp_path / "dealing.xml")], via="torch"):
        assert result.value == [True] * 4


class _Interrupting:
    """A lock after which Ctrl-C strikes as soon as it has been taken."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.release, self._is_owned = lock.release, lock._is_owned

    def acquire(self, blocking: bool) -> bool:
        self._lock.acquire(blocking)
        raise KeyboardInterrupt


def test_an_operation_interrupted_before_its_start_is_not_continued() -> None:
    queue, called = WorkQueue(), []

    def advance(*_: object) -> int:
        called.append("advance")
        return 1

    free, queue._lock = queue._lock, _Interrupting(queue._lock)
    start = queue.bind(lambda *_: 1, advance, None)
    with pytest.raises(KeyboardInterrupt):
        start(1, 2, None)
    queue._lock = free
    queue.progress()
    assert called == []
    assert free.acquire(False)


def late(done: str) -> str:
    stages = [{"select": {}}, {"dispatch": {"timeout": "2s"}}]
    comm = mcr.init({"version": 1, "backends": ["msccl"], "pipeline": stages})
    for _ in range(7):
        comm.all_reduce(torch.ones(5))
    if comm.rank == 1:
        wait_for_files(Path(done), patience=20)
        return ""
    with pytest.raises(mcr.CommTimeout) as missed:
        comm.all_reduce(torch.ones(5))
    Path(done).touch()
    return str(missed.value)


@pytest.mark.long
def test_a_late_rank_is_named_with_its_last_operation(tmp_path: Path) -> None:
    results = run_ranks(late, 2, args=[str(tmp_path / "done")], via="torch", check=False)
    assert "rank 1: last issued #7, process running" in str(results[0].value)


def codec_and_algorithm() -> tuple[str, str]:
    stages = [{"compress": {"codec": "int8_block"}}, {"select": {}}, {"dispatch": {}}]
    with mcr.init({"version": 1, "backends": ["msccl"], "pipeline": stages}) as comm:
        values = torch.full((100_000,), comm.rank + 0.3)
        with mcr.record() as log:
            comm.all_reduce(values, backend="msccl:ring")
        with pytest.raises(mcr.Unsupported) as refused:
            comm.all_reduce(values, backend="msccl:ring", compress="int8_block")
    assert (values == torch.tensor(0.3) + torch.tensor(1.3)).all()
    return str(log.records[0].codec), str(refused.value)


def test_a_named_algorithm_excludes_a_codec() -> None:
    for result in run_ranks(codec_and_algorithm, 2, via="torch"):
        codec, refused = result.value
        assert codec == "None"
        assert "compression replaces it by other operations, to which msccl:ring cannot be applied" in refused


def another_library() -> str:
    if os.environ["RANK"] == "1":
        os.environ["MCR_MSCCL_LIBRARY"] = "/nowhere/libmsccl.so"
    with pytest.raises(mcr.ConfigError) as refused:
        mcr.init({"version": 1, "backends": ["gloo"]})
    return str(refused.value)


def test_a_library_on_some_ranks_only_is_refused_on_all() -> None:
    for result in run_ranks(another_library, 2, via="torch"):
        assert "MCR_MSCCL_LIBRARY is unset on rank 0, but not so on ranks [1]" in result.value


def explained_meanwhile(file: str) -> bool:
    comm = mcr.init({"version": 1, "backends": ["msccl"], "algorithms": [file]})
    if comm.rank == 1:
        mcr.explain("all_reduce", 1024, ranks=2)
    value = torch.ones(100)
    comm.all_reduce(value, backend="msccl:mine")
    mcr.new_group([0, 1]).all_reduce(value)
    mcr.finalize()
    return bool((value == 4).all())


def test_explain_keeps_the_algorithms_of_the_job(tmp_path: Path) -> None:
    write_algorithm(samples.ring(2), tmp_path / "mine.xml")
    args = [str(tmp_path / "mine.xml")]
    assert all(result.value for result in run_ranks(explained_meanwhile, 2, args=args, via="torch"))


def without_memory(named: bool) -> list[Any]:
    """No room in /dev/shm: a job that has not asked for MSCCL continues without it."""
    from mcr_plus.backends.shm import segment

    def create(nbytes: int) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", "/dev/shm")

    segment._create = create
    try:
        comm = mcr.init({"version": 1, "backends": ["msccl", "gloo"]} if named else None)
    except mcr.BackendUnavailable as error:
        return [str(error)]
    value = torch.ones(3)
    with mcr.record() as log:
        comm.all_reduce(value)
    names = mcr.get_backends()
    mcr.finalize()
    return [value.tolist(), log.records[0].backend, names]


@pytest.mark.parametrize("named", [False, True])
def test_without_memory(named: bool) -> None:
    for result in run_ranks(without_memory, 2, args=[named], via="torch"):
        if named:
            assert "enlarge /dev/shm" in result.value[0]
        else:
            assert result.value == [[2.0] * 3, "gloo", ["gloo"]]


def waiting_moves_everything() -> bool:
    """A rank that waits for one group must run another group's operations, or its peers never come."""
    comm = mcr.init({"version": 1, "backends": ["msccl"]})
    other = mcr.new_group([2, 1, 0])
    first, second = torch.ones(5000), torch.ones(5000)
    for _ in range(50):
        one = comm.all_reduce(first.fill_(1), async_op=True)
        assert one is not None
        if comm.rank != 2:
            one.wait()
        other.all_reduce(second.fill_(1))  # to which the others come only when they are through
        one.wait()
        if not bool((first == 3).all() and (second == 3).all()):
            return False
    mcr.finalize()
    return True


def test_waiting_progresses_everything() -> None:
    assert all(result.value for result in run_ranks(waiting_moves_everything, 3, via="torch"))


def _signature(**changes: Any) -> Signature:
    plain = Signature("all_reduce", torch.float32, (64,), 256, "world", 2, reduce_op="SUM")
    return plain.replace(**changes)


def test_memory_is_allocated_for_used_channels_only(tmp_path: Path) -> None:
    from mcr_plus.backends.shm.backend import shape_of

    write_algorithm(replace(samples.ring(2), channels=256), tmp_path / "one.xml")
    write_algorithm(replace(samples.ring(3), channels=999_999_999_999_999_999), tmp_path / "all.xml")
    before = shape_of(2)
    with catalog.kept():
        catalog.use([tmp_path / "one.xml"])
        assert msccl.channels(2) == catalog.algorithm_of(_signature(algorithm="one")).channels == 1
        assert shape_of(2) == before
        with pytest.raises(ConfigError, match=r"all.xml:1: algo.nchannels: 9+, expected 1 to 256$"):
            catalog.use([tmp_path / "all.xml"])


def _reasons(hosts: str) -> Iterator[tuple[str, str]]:
    from mcr_plus.backends.shm.backend import MscclBackend

    world = World(0, len(hosts), tuple(hosts), 1.0)
    for ranks in ((0, 1), tuple(range(len(hosts)))):
        yield MscclBackend.unavailable_in(world), MscclBackend.unavailable_for(world, Group("g", ranks, 0))


def test_availability_depends_on_the_hosts_of_jobs_and_groups() -> None:
    assert list(_reasons("aa")) == [("", "")] * 2
    (alone, _), _ = _reasons("ab")
    assert "every rank is on a host of its own" in alone
    here, everywhere = _reasons("aabb")
    assert here == ("", "")
    assert everywhere[0] == ""
    assert "group 'g' is on 2 hosts" in everywhere[1]


def test_explain_excludes_msccl_between_hosts() -> None:
    found = json.loads(mcr_plus("explain", "all_reduce", "1MiB", "--ranks", "4", "--json").stdout)
    assert found["backends"] == ["msccl"]
    found = json.loads(
        mcr_plus("explain", "all_reduce", "1MiB", "--ranks", "4", "--nodes", "2", "--json").stdout
    )
    between = [
        step for step in found["steps"] if step["stage"] == "select" and "/across" in step["operation"]
    ]
    assert between
    assert all("msccl" not in step["alternatives"] for step in between)


def test_support_is_reported() -> None:
    from mcr_plus.backends.shm.backend import MscclBackend

    assert MscclBackend.supports(_signature()).level == "native"
    assert MscclBackend.supports(_signature(algorithm="ring")).level == "native"
    assert MscclBackend.supports(_signature(device="cuda")).level == "emulated"
    assert not MscclBackend.supports(_signature(algorithm="rang"))
    assert "the verifier" in MscclBackend.supports(_signature(algorithm="all_pairs", ranks=65)).how
    assert MscclBackend.algorithms("all_reduce", 2) == []
    assert MscclBackend.algorithms("all_to_all", 3) == ["direct", "two_level"]
