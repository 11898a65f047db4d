"""The DLRM example: its reader, generator and model against plain oracles, and the job on real ranks."""

from __future__ import annotations

import gzip
import json
import math
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import combinations, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import comparing
import criteo
import model
import numpy as np
import pytest
import report
import torch
import train
import typer
from libraries import TITLES
from ranks import nursery
from torch import Tensor, nn
from transports import Transport
from typer.testing import CliRunner

import mcr_plus
from mcr_plus.errors import BackendUnavailable
from mcr_plus.observe.record_table import CommunicationRow, communication

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "dlrm"
T = TypeVar("T")
SMALL = model.ModelConfig(embedding_dim=4, table_rows=20, bottom=(8,), top=(8,), dtype=torch.float64, seed=3)
INTEGERS = [b"1", b"-1", b"", b"7", b"1382", b"4", b"15", b"2", b"181", b"1", b"2", b"", b"2"]
CATEGORIES = [b"%08x" % (0xDEADBE00 + column) for column in range(26)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small matrices are faster without a pool of threads, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- ranks as threads: the communication seam without a library ---------------------------------------


@dataclass
class Board:
    """A board on which the ranks of a job post their messages."""

    size: int
    slots: dict[int, Any] = field(default_factory=dict)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=30)

    def swap(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        values = [self.slots[peer] for peer in range(self.size)]
        self.barrier.wait()
        return values


class Done:
    """An operation that has ended."""

    def wait(self) -> None: ...


@dataclass
class ThreadComms:
    """A `Transport` between threads; `fault` is added to every result of a reduction."""

    rank: int
    board: Board
    fault: float = 0.0
    closed: bool = False

    @property
    def world_size(self) -> int:
        return self.board.size

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        tag: str,
    ) -> None:
        sent = self.board.swap(self.rank, torch.split(input.detach().clone(), input_split_sizes))
        pieces = [pieces[self.rank] for pieces in sent]
        assert [len(piece) for piece in pieces] == output_split_sizes
        output.copy_(torch.cat(pieces))

    def all_reduce(self, tensor: Tensor, tag: str) -> model.Handle:
        tensor.copy_(sum(self.board.swap(self.rank, tensor.clone()), torch.tensor(self.fault)))
        return Done()

    def gather(self, value: Any) -> list[Any]:
        return self.board.swap(self.rank, value)

    def record(self, folder: Path | None = None) -> nullcontext[None]:
        assert folder is None
        return nullcontext()

    def close(self) -> None:
        self.closed = True


def on_ranks(size: int, body: Callable[[ThreadComms], T]) -> list[T]:
    """Return the results of `body` on each of `size` ranks."""
    board = Board(size)

    def run(rank: int) -> T:
        try:
            return body(ThreadComms(rank, board))
        except BaseException:
            board.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def alone(**options: Any) -> ThreadComms:
    return ThreadComms(0, Board(1), **options)


# --- reading ------------------------------------------------------------------------------------------


def line(
    label: bytes = b"1", integers: Sequence[bytes] = INTEGERS, categories: Sequence[bytes] = CATEGORIES
) -> bytes:
    return b"\t".join((label, *integers, *categories)) + b"\n"


def parse(*lines: bytes, table_rows: int = 1000) -> tuple[Any, Any, Any]:
    return criteo.parse(list(enumerate(lines, 1)), table_rows, "x.tsv")


def test_a_row_is_logarithms_hashes_and_a_label() -> None:
    dense, sparse, labels = parse(line(), line(label=b"0"))
    expected = [math.log1p(max(0, int(text or b"0"))) for text in INTEGERS]
    assert dense.dtype == labels.dtype == np.float32
    np.testing.assert_allclose(dense, [expected, expected], rtol=1e-6)
    assert sparse.tolist() == [[1 + int(text, 16) % 999 for text in CATEGORIES]] * 2
    assert labels.tolist() == [1, 0]


def test_missing_fields_are_zero() -> None:
    dense, sparse, _ = parse(line(integers=[b""] * 13, categories=[b"", *CATEGORIES[1:]]))
    assert not dense.any()
    assert sparse[0, 0] == 0
    assert sparse[0, 1:].all()


def test_no_category_hashes_to_the_row_of_missing_ones() -> None:
    _, sparse, _ = parse(line(categories=[b"%08x" % value for value in range(26)]), table_rows=2)
    assert sparse.tolist() == [[1] * 26]


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_row_may_end_early(missing: int) -> None:
    full = line(categories=[*CATEGORIES[:-missing], *[b""] * missing])
    early = full.rstrip(b"\t\n") + b"\n"
    assert early.count(b"\t") == 39 - missing
    for ours, theirs in zip(parse(early), parse(full), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_any_line_ending_is_accepted(end: bytes) -> None:
    _, sparse, _ = parse(line().rstrip(b"\n") + end)
    assert sparse[0, -1] == 1 + int(CATEGORIES[-1], 16) % 999


BAD_LINES = {
    "columns separated by tabs, got 41": line().rstrip(b"\n") + b"\t\n",
    "expected 37 to 40 columns": b"\t".join(line().split(b"\t")[:36]) + b"\n",
    "got 1": b"\n",
    "column 1 (label): expected label 0 or 1, got '2'": line(label=b"2"),
    "column 1 (label): expected label 0 or 1, got ''": line(label=b""),
    "column 4 (I3): expected an integer or nothing, got '1.5'": line(
        integers=[b"1", b"1", b"1.5", *INTEGERS[3:]]
    ),
    "column 2 (I1): expected at most 11 characters, got '123456789012'": line(
        integers=[b"123456789012", *INTEGERS[1:]]
    ),
    "column 15 (C1): expected 8 hex digits or nothing, got '68fd1g64'": line(
        categories=[b"68fd1g64", *CATEGORIES[1:]]
    ),
    "column 16 (C2): expected 8 hex digits or nothing, got '68fd'": line(
        categories=[b"", b"68fd", *CATEGORIES[2:]]
    ),
    "column 40 (C26): expected 8 hex digits or nothing, got '68fd1e64a'": line(
        categories=[*CATEGORIES[:-1], b"68fd1e64a"]
    ),
    r"got '\\xff\\xff'": line(integers=[b"\xff\xff", *INTEGERS[1:]]),
}


@pytest.mark.parametrize("message", BAD_LINES)
@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gzip"])
def test_a_malformed_row_is_refused_with_its_place(message: str, compressed: bool, tmp_path: Path) -> None:
    content = line() + line() + BAD_LINES[message] + line()
    path = tmp_path / "x.tsv"
    path.write_bytes(gzip.compress(content) if compressed else content)
    with pytest.raises(criteo.DataError) as raised:
        list(reader(path, batch_size=2, holdout=0).train())
    assert str(raised.value).startswith(f"{path}:3: ")
    assert message in str(raised.value)


def test_files_other_than_tsv_are_not_read_to_their_end(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(1_000_000))
    with pytest.raises(criteo.DataError, match=r"x\.bin:1: expected 37 to 40 columns"):
        list(reader(path).train())


def test_a_damaged_or_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(line() * 1000)[:-20])
    with pytest.raises(criteo.DataError, match=r"x\.gz: "):
        list(reader(path).train())
    with pytest.raises(criteo.DataError, match="none"):
        list(reader(tmp_path / "none").train())


def reader(path: Path, **options: Any) -> criteo.Reader:
    return criteo.Reader(path, **{"batch_size": 10, "table_rows": 1000, **options})


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    """Return 103 rows; the second integer of each is the row's number."""
    path = tmp_path / "numbered.tsv"
    rows = (line(integers=[b"0", b"%d" % number, *INTEGERS[2:]]) for number in range(1, 104))
    path.write_bytes(b"".join(rows))
    return path


def row_numbers(batch: criteo.Batch) -> list[int]:
    return [round(math.expm1(value)) for value in batch.dense[:, 1].tolist()]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("batch_size", [1, 10, 32, 1000])
def test_ranks_share_every_batch_and_miss_no_row(numbered: Path, world_size: int, batch_size: int) -> None:
    ranks = [
        reader(numbered, rank=rank, world_size=world_size, batch_size=batch_size, holdout=0.2)
        for rank in range(world_size)
    ]
    for choose, expected in (
        (criteo.Reader.train, [number for number in range(1, 104) if number % 5]),
        (criteo.Reader.held_out, list(range(5, 104, 5))),
    ):
        seen: list[int] = []
        for shares in zip(*(choose(rank) for rank in ranks), strict=True):
            assert [len(share.labels) for share in shares] == list(shares[0].sizes)
            seen += [number for share in shares for number in row_numbers(share)]
        assert seen == expected


def test_at_most_a_limited_share_is_held_out(numbered: Path) -> None:
    assert sum(len(batch.labels) for batch in reader(numbered, holdout=0).train()) == 103
    assert list(reader(numbered, holdout=0).held_out()) == []
    limited = list(reader(numbered, batch_size=4, holdout=0.1).held_out(limit=6))
    assert [number for batch in limited for number in row_numbers(batch)] == [10, 20, 30, 40, 50, 60]


def test_the_part_read_grows_to_all(numbered: Path) -> None:
    rows = reader(numbered)
    seen = [rows.fraction_read for _ in rows.train()]
    assert seen == sorted(seen)
    assert rows.fraction_read == 1


@pytest.mark.parametrize(("total", "parts"), [(26, 1), (26, 4), (26, 27), (0, 3), (7, 7)])
def test_shares_are_even_and_complete(total: int, parts: int) -> None:
    sizes = criteo.shares(total, parts)
    assert len(sizes) == parts
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1


# --- generating ---------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_rows_and_fewer_give_a_prefix() -> None:
    rows = list(criteo.generate(criteo.CHUNK + 50, seed=5))
    assert len(rows) == criteo.CHUNK + 50
    assert rows == list(criteo.generate(criteo.CHUNK + 50, seed=5))
    assert rows[:30] == list(criteo.generate(30, seed=5))
    assert rows[:30] != list(criteo.generate(30, seed=6))
    assert rows[:50] != rows[criteo.CHUNK :]


def test_generated_rows_look_like_criteo() -> None:
    rows = list(criteo.generate(2000))
    _, sparse, labels = parse(*rows, table_rows=10**6)
    assert {row.count(b"\t") + 1 for row in rows} == {37, 38, 40}
    assert 0.15 < labels.mean() < 0.35
    most_frequent = np.unique(sparse[:, 2], return_counts=True)[1].max()
    assert 0.1 < most_frequent / len(rows) < 0.5
    assert len(np.unique(sparse[:, 2])) > 200


def test_written_files_are_the_same_rows_in_the_same_bytes(tmp_path: Path) -> None:
    runner, app = CliRunner(), command(criteo.main)
    for name in ("a.tsv", "a.tsv.gz", "b.tsv.gz"):
        assert runner.invoke(app, [str(tmp_path / name), "--rows", "20", "--seed", "4"]).exit_code == 0
    plain = (tmp_path / "a.tsv").read_bytes()
    assert plain == b"".join(criteo.generate(20, seed=4))
    assert gzip.decompress((tmp_path / "a.tsv.gz").read_bytes()) == plain
    assert (tmp_path / "a.tsv.gz").read_bytes() == (tmp_path / "b.tsv.gz").read_bytes()


def test_the_bundled_file_is_the_output_of_the_generator() -> None:
    with gzip.open(EXAMPLE / "sample.tsv.gz") as bundled:
        assert list(islice(bundled, 100)) == list(criteo.generate(100))


# --- metrics ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_auc_counts_pairs(seed: int) -> None:
    draw = random.Random(seed)
    labels = np.array([draw.random() < 0.3 for _ in range(60)], dtype=np.float32)
    scores = np.array([draw.randrange(8) / 4 - 1 for _ in range(60)])  # many ties
    positives, negatives = scores[labels == 1], scores[labels == 0]
    won = sum(float(p > n) + 0.5 * float(p == n) for p in positives for n in negatives)
    assert report.auc(labels, scores) == pytest.approx(won / (len(positives) * len(negatives)))


def test_auc_at_its_ends() -> None:
    labels = np.array([0, 0, 1, 1])
    assert report.auc(labels, np.array([1, 2, 3, 4])) == 1
    assert report.auc(labels, np.array([4, 3, 2, 1])) == 0
    assert report.auc(labels, np.zeros(4)) == 0.5
    assert math.isnan(report.auc(np.ones(4), np.arange(4)))
    assert math.isnan(report.auc(np.empty(0), np.empty(0)))


def test_loss_and_accuracy_are_torchs() -> None:
    labels, scores = torch.tensor([0.0, 1, 1, 0]), torch.tensor([-3.0, 2, -1, 100])
    expected = nn.functional.binary_cross_entropy_with_logits(scores, labels)
    assert report.log_loss(labels.numpy(), scores.numpy()) == pytest.approx(expected.item())
    assert report.accuracy(labels.numpy(), scores.numpy()) == 0.5


def test_communication_is_summed_by_kind_tag_and_backend() -> None:
    def record(kind: str, tag: str | None, backend: str, nbytes: int, start: float, end: float) -> Any:
        times = {"t_issue": start, "t_done": end, "waited": (end - start) / 4}
        sizes = {"bytes": nbytes, "wire_bytes": nbytes // 4, "ranks": 2}
        return SimpleNamespace(kind=kind, tag=tag, backend=backend, **sizes, **times)

    records = [
        record("all_to_all", "a", "mpi", 300, 0, 1),
        record("all_to_all", "a", "mpi", 400, 1, 4),
        record("all_to_all", "a", "mpi", 0, 4, 6),
        record("all_reduce", None, "gloo", 100, 6, 7),
        record("all_reduce", None, "gloo", 100, 2.875, 6.875),  # waited for from 5.875 on
    ]
    assert communication(records, seconds=10) == [
        CommunicationRow("all_to_all", "a", "mpi", 3, 700, 88, 2e6, 0.6, 0.15),
        CommunicationRow("all_reduce", "", "gloo", 2, 200, 50, 2.5e6, 0.5, 0.1),
    ]


# --- the model ----------------------------------------------------------------------------------------


def test_interaction_is_every_pair_once() -> None:
    dense, vectors = torch.randn(3, 5), torch.randn(3, 26, 5)
    out = model.interact(dense, vectors)
    for row in range(3):
        stacked = [dense[row], *vectors[row]]
        pairs = sorted(combinations(range(27), 2), key=lambda pair: (pair[1], pair[0]))
        expected = [stacked[i] @ stacked[j] for i, j in pairs]
        torch.testing.assert_close(out[row], torch.cat([dense[row], torch.stack(expected)]))


@pytest.mark.parametrize("size", [1, 3])
def test_gradients_take_the_reverse_exchange(size: int) -> None:
    """Rank r sends r + p + 1 rows to rank p, and weighs row i of its result by i + 1."""

    def body(comms: ThreadComms) -> tuple[Tensor, Tensor]:
        sent = [comms.rank + peer + 1 for peer in range(size)]
        values = torch.full((sum(sent), 2), float(comms.rank), requires_grad=True)
        output: Tensor = model.Exchange.apply(values, comms, sent, sent)  # type: ignore[no-untyped-call]
        (output * torch.arange(1.0, len(output) + 1)[:, None]).sum().backward()
        assert values.grad is not None
        return output.detach(), values.grad

    for rank, (output, grad) in enumerate(on_ranks(size, body)):
        counts = [rank + peer + 1 for peer in range(size)]
        assert output[:, 0].tolist() == [peer for peer in range(size) for _ in range(counts[peer])]
        # My piece lies on rank p after the pieces of the ranks before me.
        before = [sum(peer + other + 1 for other in range(rank)) for peer in range(size)]
        assert grad[:, 0].tolist() == [
            before[peer] + i + 1 for peer in range(size) for i in range(counts[peer])
        ]


def test_embedding_on_three_ranks_is_the_look_up_of_one() -> None:
    sparse = torch.randint(0, 20, (7, 26))
    sizes = [3, 0, 4]
    expected = model.ShardedEmbedding(SMALL, alone())(sparse, [7])

    def body(comms: ThreadComms) -> Tensor:
        mine = torch.split(sparse, sizes)[comms.rank]
        vectors: Tensor = model.ShardedEmbedding(SMALL, comms)(mine, sizes)
        return vectors.detach()

    torch.testing.assert_close(torch.cat(on_ranks(3, body)), expected.detach())


def test_a_gradient_buffer_holds_the_sum_and_is_the_gradient() -> None:
    def body(comms: ThreadComms) -> tuple[Tensor, Tensor]:
        layer = nn.Linear(2, 1)
        buffer = model.GradientBuffer(layer, comms, "test")
        for _ in range(2):
            buffer.zero()
            layer(torch.full((1, 2), comms.rank + 1.0)).sum().backward()
            buffer.wait()
        assert layer.weight.grad is not None
        assert layer.weight.grad.data_ptr() == buffer.buffer.data_ptr()
        return layer.weight.grad, buffer.buffer

    for weight, whole in on_ranks(3, body):
        assert weight.tolist() == [[6, 6]]
        assert whole.tolist() == [6, 6, 3]


def job(data: Path, **changes: Any) -> train.Job:
    options = {
        "data": data,
        "model": SMALL,
        "batch_size": 50,
        "lr": 0.1,
        "epochs": 2,
        "steps": None,
        "holdout": 0.1,
        "eval_rows": 1000,
    }
    return train.Job(**{**options, **changes})


def train_on(comms: Transport, work: train.Job) -> tuple[report.Result, Tensor]:
    trainer = train.Trainer(work, comms, lambda *_: None)
    result = trainer.run()
    return result, trainer.model.embedding.weight.detach()


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("criteo") / "generated.tsv"
    criteo.write(path, rows=337, seed=1)  # 304 to train on: the last batch has 4 rows
    return path


@pytest.mark.short("2]", "3]", "5]")
@pytest.mark.parametrize("size", [2, 3, 5, 27])
def test_any_number_of_ranks_trains_the_same_model(size: int, generated: Path) -> None:
    single, weight = train_on(alone(), job(generated))
    several = on_ranks(size, lambda comms: train_on(comms, job(generated)))
    assert len(single.losses) == 14
    for result, _ in several:
        assert comparing.difference(result.losses, single.losses) < 1e-12
        assert report.log_loss(result.labels, result.scores) == pytest.approx(
            report.log_loss(single.labels, single.scores)
        )
    torch.testing.assert_close(torch.cat([part for _, part in several]), weight)


def test_gradients_are_those_of_autograd(generated: Path) -> None:
    """One step of two ranks moves every weight by plain autograd's gradient of the mean loss."""
    batch = next(reader(generated, batch_size=9, table_rows=SMALL.table_rows).train())
    plain = model.DLRM(SMALL, alone())
    logits = plain(batch.dense, batch.sparse, [9])
    mean = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.double())
    expected = torch.autograd.grad(mean, list(plain.bottom.parameters()))

    def body(comms: ThreadComms) -> list[Tensor]:
        dlrm = model.DLRM(SMALL, comms)
        rows = slice(0, 5) if comms.rank == 0 else slice(5, 9)
        part = model.loss(dlrm(batch.dense[rows], batch.sparse[rows], (5, 4)), batch.labels[rows], (5, 4))
        part.backward()
        dlrm.wait_for_gradients()
        return [p.grad for p in dlrm.bottom.parameters() if p.grad is not None]

    for gradients in on_ranks(2, body):
        torch.testing.assert_close(gradients, list(expected))


@pytest.mark.long
def test_training_reduces_the_loss() -> None:
    work = job(
        EXAMPLE / "sample.tsv.gz", model=model.ModelConfig(bottom=(64,), top=(64,)), epochs=6, batch_size=128
    )
    result, _ = train_on(alone(), work)
    assert result.last < result.first - 0.02
    assert report.auc(result.labels, result.scores) > 0.65


def test_training_restarts_the_file_at_its_end(generated: Path) -> None:
    result, _ = train_on(alone(), job(generated, steps=10))
    assert len(result.losses) == 10


# --- the command line ---------------------------------------------------------------------------------


def command(main: Callable[..., None]) -> typer.Typer:
    app = typer.Typer()
    app.command()(main)
    return app


@pytest.fixture
def transports(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ThreadComms | None]]:
    """Return one rank on every library, None for a missing library."""
    known: dict[str, ThreadComms | None] = {name: alone() for name in TITLES}

    def open_transport(name: str, config: Path) -> ThreadComms:
        if (transport := known[name]) is None:
            raise BackendUnavailable(f"no {name}")
        return transport

    monkeypatch.setattr(train, "open_transport", open_transport)
    yield known
    assert all(transport.closed for transport in known.values() if transport and transport.board.slots)


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(command(train.main), [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_one_run_reports(transports: object, generated: Path, tmp_path: Path) -> None:
    status, output = invoke("--data", generated, "--epochs", 1, "--json", tmp_path / "out.json")
    assert status == 0
    assert "train loss" in output
    assert "AUC" in output
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["steps"] == len(document["train_loss"]["steps"]) == 3
    assert document["held_out"]["rows"] == 33


@pytest.mark.long
def test_comparison_of_equals(
    transports: dict[str, ThreadComms | None], generated: Path, tmp_path: Path
) -> None:
    transports["mpi"] = None
    status, output = invoke("--compare", "--data", generated, "--steps", 2, "--json", tmp_path / "out.json")
    assert status == 0
    assert "mcr_plus mpi did not run: no mpi" in output
    document = json.loads((tmp_path / "out.json").read_text())
    assert [run["max_difference"] for run in document["runs"]] == [0, 0, None, 0, 0]
    assert [run["rounds"] for run in document["runs"]] == [3, 3, None, 3, 3]


@pytest.mark.long
def test_a_few_lines_compare_with_torch(transports: object, generated: Path) -> None:
    status, output = invoke("--data", generated, "--steps", 2, "--against-torch")
    assert status == 0
    for name in ("torch.distributed gloo", "mcr_plus pipeline"):
        assert re.search(rf"^  {name} +[\d,]+  \([\d,]+–[\d,]+\)$", output, re.MULTILINE)
    assert re.search(
        r"  mcr_plus pipeline: (no difference, for the ranges overlap|[\d.]+ × as fast)\.", output
    )
    (speed,) = re.findall(
        r"^speed +([\d,]+) samples/s on 1 rank, in the median of 2 steps$", output, re.MULTILINE
    )
    alone = f"Compare these two with each other alone: the {speed} samples/s above are of 2 steps at another"
    compared = "Compared with torch.distributed: 60 steps of the same job on each, 3 times in turns"
    assert {f"{alone} time.", compared} <= set(output.splitlines())
    assert "Next:      mcr-plus run -n 1 examples/dlrm/train.py --compare" in output


@pytest.mark.long
def test_a_library_that_adds_wrongly_is_found(
    transports: dict[str, ThreadComms | None], generated: Path
) -> None:
    transports["mix"] = alone(fault=1e-2)
    status, output = invoke("--compare", "--data", generated, "--steps", 3)
    assert status == 1
    assert "losses differ by more than 1e-05" in output


def test_impossible_requests_are_refused(transports: object, tmp_path: Path) -> None:
    status, output = invoke("--data", tmp_path / "none.tsv")
    assert status == 1
    assert "none.tsv" in output
    (tmp_path / "empty.tsv").touch()
    status, output = invoke("--data", tmp_path / "empty.tsv")
    assert status == 1
    assert "no rows to train on" in output
    assert invoke("--trace", "x.json", "--comms", "torch")[0] == 2
    assert invoke("--holdout", 0.9)[0] == 2


# --- real ranks ---------------------------------------------------------------------------------------


def launch(launcher: Sequence[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {
        **nursery().environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    line = [*launcher, str(EXAMPLE / "train.py"), *map(str, arguments)]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.long
def test_two_processes_on_torch_train_the_same_model(generated: Path, tmp_path: Path) -> None:
    """The reference transport itself, in float32."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ("--comms", "torch", "--data", generated, "--table-rows", 20, "--epochs", 2)
    done = launch(torchrun, *options, "--json", tmp_path / "out.json")
    for _ in range(2):  # gloo itself aborts now and then while a process ends (pytorch #190489)
        if "terminate called without an active exception" in done.stderr:
            done = launch(torchrun, *options, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    work = job(generated, model=model.ModelConfig(table_rows=20), batch_size=128)
    single, _ = train_on(alone(), work)
    losses = json.loads((tmp_path / "out.json").read_text())["train_loss"]["steps"]
    assert comparing.difference(np.array(losses), single.losses) < comparing.TOLERANCE


def mpi_is_there() -> bool:
    pytest.importorskip("mpi4py")
    return (Path(sys.executable).parent / "mpiexec").exists()


@pytest.mark.skipif(not hasattr(mcr_plus, "init"), reason="needs the library")
def test_all_libraries_train_the_same_model_on_two_ranks(generated: Path, tmp_path: Path) -> None:
    if not mpi_is_there():
        pytest.skip("needs mpiexec beside python")
    mpiexec = [str(Path(sys.executable).parent / "mpiexec"), "-n", "2", nursery().python]
    out = tmp_path / "out.json"
    done = launch(mpiexec, "--compare", "--rounds", 1, "--data", generated, "--steps", 5, "--json", out)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    assert [run["transport"] for run in document["runs"]] == list(TITLES.values())
    for run in document["runs"]:
        assert run["missing"] is None
        assert run["ranks"] == 2
        assert run["max_difference"] <= document["tolerance"]
