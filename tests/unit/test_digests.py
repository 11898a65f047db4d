"""Digests of tensors, their files, and the comparison of files made by hand."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from command import mcr_plus

import mcr_plus as mcr
from mcr_plus import registry
from mcr_plus.config import reader
from mcr_plus.errors import ConfigError, Unsupported
from mcr_plus.observe.options import DigestOptions
from mcr_plus.reproducible.compare import Comparison, compare
from mcr_plus.reproducible.digest_file import (
    DONE,
    END,
    INPUT,
    OUTPUT,
    About,
    CallOfProgram,
    about_line,
    chunk,
    kept_file,
    load,
)
from mcr_plus.reproducible.digests import DigestWriter, digest_of
from mcr_plus.reproducible.hook import DigestHook

WORD = (1 << 64) - 1
FACTOR = 0x9E3779B97F4A7C15
SEED = 0x243F6A8885A308D3


def mixed(left: int, right: int) -> int:
    product = (left ^ right) * FACTOR & WORD
    return product ^ product >> 29


def of_block(data: bytes) -> int:
    """The checksum of a block by Python's integers, as `kernels/checksum.py` describes it."""
    data += bytes(-len(data) % 512)
    chains = [SEED * (2 * lane + 1) & WORD for lane in range(64)]
    for row in range(0, len(data), 512):
        for lane, word in enumerate(struct.unpack("<64Q", data[row : row + 512])):
            joined = chains[lane] ^ word
            low = (joined & 0xFFFFFFFF) * (FACTOR & 0xFFFFFFFF) & 0xFFFFFFFF
            high = (joined >> 32) * (FACTOR >> 32) & 0xFFFFFFFF
            chains[lane] = (low << 32 | high) ^ (high >> 15 << 32 | low >> 15)
    while len(chains) > 1:
        half = len(chains) // 2
        turned = [word << 17 & WORD | word >> 47 for word in chains[half:]]
        chains = [mixed(*pair) for pair in zip(chains[:half], turned, strict=True)]
    return chains[0]


def by_hand(values: torch.Tensor) -> int:
    data, total = values.view(-1).view(torch.uint8).numpy().tobytes(), 0
    for at in range(0, len(data), 1 << 16):
        total = mixed(total, of_block(data[at : at + (1 << 16)]))
    return mixed(total, values.numel() << 4 | values.itemsize)


def test_a_file_says_at_once_whose_it_is(tmp_path: Path) -> None:
    about = About("job", 0, 2)
    writer = DigestWriter(tmp_path / "new", about, DigestOptions(folder=str(tmp_path)))
    found = load(tmp_path / "new")
    assert (found.about, len(found.rows), found.ended) == (about, 0, False)
    writer.stop()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex128, torch.bool])
def test_a_digest_is_that_of_the_description(dtype: torch.dtype) -> None:
    for size in (0, 1, 7, 129, 40_001):
        values = torch.arange(size).mul(2654435761).remainder(251).to(dtype)
        assert digest_of(values) == by_hand(values), size


def test_every_bit_and_the_shape_count() -> None:
    values = torch.zeros(33, dtype=torch.uint8)
    seen = {digest_of(values), digest_of(values[:32]), digest_of(values[:32].view(torch.int16))}
    for bit in range(8 * 33):
        changed = values.clone()
        changed[bit // 8] = 1 << bit % 8
        seen.add(digest_of(changed))
    assert len(seen) == 3 + 8 * 33


# -- files ------------------------------------------------------------------------------------------------


def call(text: str = "all_reduce SUM float32", *, stream: str = "world", **more: Any) -> CallOfProgram:
    values = {"ranks": 2, "how": "gloo", "site": "train.py:3, in step", "dtype": "float32", **more}
    return CallOfProgram(
        stream, text.split()[0], text, values["dtype"], values["ranks"], values["how"], values["site"]
    )


Row = tuple[CallOfProgram, int, int, int]
"""Call, elements, digests of input and output."""


def write(
    folder: Path,
    rank: int,
    rows: list[Row],
    *,
    size: int = 2,
    end: bytes = END,
    undone: int = -1,
    job: str = "j",
    began: float = 0.0,
    world: str = "job0-epoch0",
) -> Path:
    calls = list(dict.fromkeys(row[0] for row in rows))
    numbers: dict[str, int] = {}
    plain = []
    for index, (of, elements, given, result) in enumerate(rows):
        numbers[of.stream] = number = numbers.get(of.stream, 0) + 1
        flags = INPUT | (OUTPUT | DONE) * (index != undone)
        plain.append((calls.index(of), flags, index, number, elements, given, result))
    folder.mkdir(exist_ok=True)
    path = folder / f"{world}-rank{rank}.digests"
    parts = [chunk(calls, plain[:2]), chunk([], plain[2:])] if rows else []
    path.write_bytes(about_line(About(job, rank, size, began)) + b"".join(parts) + end)
    return path


def both(tmp_path: Path, one: dict[int, list[Row]], other: dict[int, list[Row]]) -> Comparison:
    for name, run in (("one", one), ("other", other)):
        for rank, rows in run.items():
            write(tmp_path / name, rank, rows)
    return compare(tmp_path / "one", tmp_path / "other")


def test_a_changed_input_comes_before_the_outputs_that_follow_from_it(tmp_path: Path) -> None:
    """Rank 0 sees another output of `side` first; it follows from rank 1's input, which differed earlier."""
    a, side = call(), call(stream="side")
    result = both(
        tmp_path,
        {0: [(side, 4, 1, 1), (a, 4, 1, 1)], 1: [(a, 4, 1, 1), (a, 4, 2, 1), (side, 4, 1, 1)]},
        {0: [(side, 4, 1, 9), (a, 4, 1, 1)], 1: [(a, 4, 1, 1), (a, 4, 9, 1), (side, 4, 9, 9)]},
    )
    assert result.first is not None
    assert (result.first.what, result.first.stream, result.first.number, result.first.ranks) == (
        "input",
        "world",
        2,
        [1],
    )


def test_a_message_received_follows_from_what_was_sent(tmp_path: Path) -> None:
    sent, received, a = call("send float32 peer=1"), call("recv float32 peer=0"), call()
    result = both(
        tmp_path,
        {0: [(a, 1, 1, 1)] * 5 + [(sent, 4, 1, 0)], 1: [(received, 4, 0, 1), (a, 1, 1, 1)]},
        {0: [(a, 1, 1, 1)] * 5 + [(sent, 4, 9, 0)], 1: [(received, 4, 0, 9), (a, 1, 1, 1)]},
    )
    assert result.first is not None
    assert (result.first.what, result.first.number, result.first.ranks) == ("input", 6, [0])


def test_the_end_of_one_run_and_operations_not_done(tmp_path: Path) -> None:
    rows: list[Row] = [(call(), 4, each, each) for each in range(5)]
    one = tmp_path / "one"
    for rank in (0, 1):
        write(one, rank, rows)
    for number, (cut, undone) in enumerate(((rows[:3], -1), (rows, 3))):
        other = tmp_path / f"other{number}"
        for rank in (0, 1):
            write(other, rank, cut, undone=undone)
        for pair, missing in (((one, other), 1), ((other, one), 0)):
            first = compare(*pair).first
            assert first is not None
            assert (first.what, first.number, first.ranks) == ("end", 4, [0, 1])
            assert [each is None for each in first.operations] == [missing == 0, missing == 1]
    # an earlier difference says more than an end before it
    write(tmp_path / "both", 0, rows[:1])
    write(tmp_path / "both", 1, [*rows[:4], (call(), 4, 4, 99)])
    first = compare(one, tmp_path / "both").first
    assert first is not None
    assert (first.what, first.number, first.ranks) == ("output", 5, [1])


def test_a_file_cut_anywhere_gives_its_whole_chunks(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [(call(), 4, each, each) for each in range(6)])
    content = path.read_bytes()
    begin, found = content.index(b"\n") + 1, []
    for length in range(begin, len(content) + 1):
        path.write_bytes(content[:length])
        digests = load(path)
        found.append((len(digests.rows), digests.ended))
    assert sorted(set(found)) == [(0, False), (2, False), (6, False), (6, True)]
    assert found == sorted(found)
    for length in range(begin):
        path.write_bytes(content[:length])
        if length < begin - 1:
            with pytest.raises(ConfigError):
                load(path)


def test_the_last_of_several_rows_of_an_operation_counts(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [(call(), 4, 1, 1)] * 3, undone=1, end=b"")
    with path.open("ab") as file:
        file.write(chunk([], [(0, DONE | INPUT | OUTPUT, 1, 2, 4, 1, 7)]) + END)
    rows = load(path).rows
    assert rows["index"].tolist() == [0, 1, 2]
    assert rows["output"].tolist() == [1, 7, 1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "begins with b''"),
        (b"PK\3\4", "begins with b'PK"),
        (b"mcr_plus digests 2 {}\n", "begins with b'mcr_plus digests 2 ', not with b'mcr_plus digests 1 '"),
        (b"mcr_plus digests 1 {}\n", "expected what `observe: {digests: FOLDER}` has written"),
        (
            about_line(About("j", 0, 1)) + chunk([], [(7, 1, 0, 1, 1, 1, 1)]),
            "operations without a description",
        ),
        (about_line(About("j", 0, 1)) + b"\2\0\0\0\0\0\0\0{}", "expected what"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes, said: str) -> None:
    write(tmp_path / "one", 0, [(call(), 4, 1, 1)], size=1)
    path = write(tmp_path / "other", 0, [], size=1)
    path.write_bytes(content)
    answer = mcr_plus("compare", tmp_path / "one", tmp_path / "other")
    assert (answer.returncode, answer.stdout, answer.stderr.count("\n")) == (2, "", 1)
    assert answer.stderr.startswith(f"mcr-plus: {path}: ")
    assert said in answer.stderr


def test_folders_that_cannot_be_compared(tmp_path: Path) -> None:
    write(tmp_path / "one", 0, [(call(), 4, 1, 1)])
    write(tmp_path / "other", 1, [(call(), 4, 1, 1)])
    (tmp_path / "empty").mkdir()
    (tmp_path / "epoch").mkdir()
    os.link(tmp_path / "one" / "job0-epoch0-rank0.digests", tmp_path / "epoch" / "job0-epoch1-rank0.digests")
    for other, said in (
        ("missing", "missing: cannot read: No such file or directory; expected what"),
        ("empty", "empty: has no files jobN-epochN-rankN.digests; expected what"),
        ("other", "no rank has files in both runs: rank 0 in A, rank 1 in B"),
        ("epoch", "nothing can be compared: only run A has job 0, epoch 0; only run B has job 0, epoch 1"),
    ):
        answer = mcr_plus("compare", tmp_path / "one", tmp_path / other, "--json")
        assert (answer.returncode, answer.stdout) == (2, "")
        assert said in answer.stderr


def test_files_of_an_earlier_run_are_named(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    rows: list[Row] = [(call(), 4, 1, 1)]
    for folder, began in ((one, 50.0), (other, 70.0)):
        for rank in (0, 1):
            write(folder, rank, rows, job=folder.name, began=began + rank)
        write(folder, 0, rows, job="later", began=began + 9, world="job0-epoch1")
        write(folder, 0, rows, job="again", began=began + 99, world="job1-epoch0")
    assert compare(one, other).operations == 2 + 1 + 1
    write(other, 2, rows, size=3, job="earlier", began=60.0)
    write(other, 0, rows, job="earlier", began=65.0, world="job0-epoch2")
    stale = "job0-epoch0-rank2.digests, job0-epoch2-rank0.digests"
    with pytest.raises(ConfigError, match=f"other: of an earlier run: {stale}; each run needs"):
        compare(one, other)


def test_a_file_written_again_takes_kept_elements_with_it(tmp_path: Path) -> None:
    paths = [kept_file(tmp_path / f"job0-epoch0-rank{rank}.digests", "world", 3, "input") for rank in (1, 11)]
    for path in paths:
        path.write_bytes(b"")
    about, options = About("j", 1, 12), DigestOptions(folder=str(tmp_path))
    DigestWriter(tmp_path / "job0-epoch0-rank1.digests", about, options).close()
    assert [path.exists() for path in paths] == [False, True]


def test_json_has_all_that_is_printed(tmp_path: Path) -> None:
    write(tmp_path / "one", 0, [(call(), 4, 1, 1)], size=1)
    write(tmp_path / "other", 0, [(call(site="other.py:9, in f"), 4, 1, 2)], size=1, end=b"")
    answer = mcr_plus("compare", tmp_path / "one", tmp_path / "other", "--json")
    found = json.loads(answer.stdout)
    assert (answer.returncode, found["same"], found["operations"]) == (1, False, 0)
    assert found["notes"] == ["rank 0: run B was killed, or goes on"]
    assert found["first"]["operations"][1]["site"] == "other.py:9, in f"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("''", "digests"),
        (
            "{folder: f, keep: world}",
            "expected GROUP#NUMBER or GROUP#FIRST-LAST, as in world#57-60, got 'world'",
        ),
        ("{keep: 'world#1'}", "folder"),
        ("{folder: f, kept: 1}", "kept"),
    ],
)
def test_options_that_are_wrong(tmp_path: Path, options: str, said: str) -> None:
    (tmp_path / "p.yaml").write_text(f"version: 1\nobserve:\n  digests: {options}\n")
    with pytest.raises(ConfigError, match="digests") as error:
        reader.load(tmp_path / "p.yaml")
    assert said in str(error.value)


def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    given = reader.load({"version": 1, "observe": {"digests": str(tmp_path / "file" / "folder")}})
    with pytest.raises(
        ConfigError, match=r"observe.digests: expected a folder .*/file/folder': Not a directory"
    ):
        DigestHook().check(given)


def test_an_installation_without_this_folder_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_is_here", lambda reference: "reproducible" not in str(reference))
    with pytest.raises(
        ConfigError, match=r"digests: .*this installation of mcr_plus has no folder `reproducible`"
    ):
        reader.load({"version": 1, "observe": {"digests": "f"}})
    with pytest.raises(Unsupported, match="needs the folder `reproducible`, which is not installed"):
        registry.reproducible("sums over this library")
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters())
    with mcr.init(), pytest.raises(Unsupported, match="needs the folder `reproducible`"):
        mcr.wrap(model, sgd, accumulate="exact")
    assert all("Digest" not in str(hook) for hook in registry.installed("hooks"))


def test_options_are_read_back() -> None:
    given = {"version": 1, "observe": {"digests": {"folder": "f", "keep": "world/1 buckets#5-7"}}}
    config = reader.load(given)
    assert reader.load(reader.dump(config)).observe == config.observe
    assert reader.fingerprint(config) == reader.fingerprint(reader.load({"version": 1}))
