"""Reports of recordings with known costs: sums by brute force, findings, refused files, the page."""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import BEGAN, SECONDS, expected, job_of, operation, save, titles

from mcr_plus.core.kinds import bus_factor
from mcr_plus.errors import ConfigError, InvalidArgument
from mcr_plus.observe.record import Record
from mcr_plus.observe.record_file import load_recording, prepare_folder
from mcr_plus.observe.report.analysis import groups, merged, shares_of, skew, steps
from mcr_plus.observe.report.codec_error import relative_error
from mcr_plus.observe.report.job import load_job
from mcr_plus.observe.report.page import report, write_report


def random_records(seed: int, count: int) -> list[Record]:
    chance = random.Random(seed)
    records = []
    for number in range(1, count + 1):
        at, seconds = chance.uniform(0, 9), chance.uniform(1e-5, 0.2)
        kind, tag = chance.choice(
            [("all_reduce", "a"), ("all_gather", None), ("all_to_all", "b"), ("send", "b")]
        )
        codec = chance.choice([None, None, "bf16"])
        records.append(
            operation(
                number,
                at,
                seconds,
                chance.choice([0.0, chance.uniform(0, seconds)]),
                kind=kind,
                tag=tag,
                codec=codec,
                backend=chance.choice(["gloo", "msccl:ring"]),
                bytes=chance.randrange(1, 10**6),
                error=None if chance.random() < 0.9 else "lost",
                fused=chance.randrange(1, 4),
                wire_bytes=chance.randrange(1, 10**6),
            )
        )
    return records


def test_a_file_returns_what_was_saved(tmp_path: Path) -> None:
    records = random_records(1, 50)
    found = load_recording(save(tmp_path, 1, records, (1.0, 2.5)))
    assert found.rank == 1
    assert found.steps.tolist() == [BEGAN + 1.0, BEGAN + 2.5]
    for name in (
        "sequence",
        "bytes",
        "wire_bytes",
        "fused",
        "ranks",
        "t_issue",
        "t_done",
        "waited",
        "is_async",
    ):
        assert found.columns[name].tolist() == [getattr(record, name) for record in records]
    for name in ("kind", "tag", "group", "backend", "codec", "dtype", "error"):
        texts = [*found.about["names"][name], None]  # -1 is the last one
        assert [texts[number] for number in found.columns[name]] == [
            getattr(record, name) for record in records
        ]
    assert [each.name for each in tmp_path.iterdir()] == ["rank1.npz"]
    empty = load_recording(save(tmp_path, 0, []))
    assert empty.count == 0


def waiting_by_sampling(records: list[Record]) -> dict[int, float]:
    """Seconds of each record: moments in which it is waited for, and nothing whose wait began before."""
    points = np.linspace(BEGAN, BEGAN + SECONDS, 100_001)
    begins = np.array([record.t_done - record.waited for record in records])
    ends = np.array([record.t_done for record in records])
    waited = (points[:, None] >= begins) & (points[:, None] < ends)
    first = np.where(waited, begins, np.inf).argmin(axis=1)[waited.any(axis=1)]
    seconds = np.bincount(first, minlength=len(records)) * SECONDS / 100_000
    return {id(record): float(each) for record, each in zip(records, seconds, strict=True)}


def test_sums_by_operation(tmp_path: Path) -> None:
    ranks = random_records(2, 300), random_records(3, 200)
    expected: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in (*ranks[0], *ranks[1]):
        expected[record.kind, record.tag or "", record.backend, record.codec or ""].append(record)
    waiting: dict[int, float] = {}
    for records in ranks:
        waiting |= waiting_by_sampling(records)
    found = groups(job_of(tmp_path, *ranks))
    assert len(found) == len(expected)
    assert [group.waited for group in found] == sorted((group.waited for group in found), reverse=True)
    for group in found:
        some = expected[group.kind, group.tag, group.backend, group.codec]
        good = [record for record in some if record.error is None]
        times = [record.t_done - record.t_issue for record in good]
        moved = sum(record.bytes * bus_factor(record.kind, record.ranks) for record in good)
        assert (group.count, group.failed) == (len(some), len(some) - len(good))
        assert group.bytes == sum(record.bytes for record in good)
        assert group.wire == sum(record.wire_bytes for record in good)
        assert group.p50_us == pytest.approx(np.percentile(times, 50) * 1e6)
        assert group.p95_us == pytest.approx(np.percentile(times, 95) * 1e6)
        assert group.busbw == pytest.approx(moved / sum(times) / 1e9)
        share = sum(waiting[id(record)] for record in good) / (2 * SECONDS)
        assert group.waited == pytest.approx(share, abs=2e-4)
        assert group.in_flight == pytest.approx(sum(times) / (2 * SECONDS))
        assert group.fused == pytest.approx(np.mean([record.fused for record in good]))


def test_unions_of_intervals_by_sampling(tmp_path: Path) -> None:
    records = [replace(record, error=None) for record in random_records(5, 60)]
    begins, ends = (np.array([getattr(r, name) for r in records]) for name in ("t_issue", "t_done"))
    lefts, rights = merged(begins, ends)
    assert (lefts[1:] > rights[:-1]).all()
    points = np.linspace(BEGAN, BEGAN + SECONDS, 20_001)
    inside = ((points[:, None] >= begins) & (points[:, None] <= ends)).any(axis=1)
    assert (((points[:, None] >= lefts) & (points[:, None] <= rights)).any(axis=1) == inside).all()
    waits = np.array([record.t_done - record.waited for record in records])
    waiting = ((points[:, None] >= waits) & (points[:, None] < ends)).any(axis=1).mean()
    shares = shares_of(job_of(tmp_path, records, []), 0)
    assert shares.waiting == pytest.approx(waiting, abs=2e-3)
    assert shares.computing == pytest.approx(1 - waiting, abs=2e-3)
    assert shares.hidden == pytest.approx(inside.mean() - waiting, abs=3e-3)
    assert shares_of(load_job(tmp_path), 1) == (type(shares))(1.0, 0.0, 0.0)


def test_a_typical_step_excludes_the_warm_up(tmp_path: Path) -> None:
    ends = (0.0, 5.0, 5.3, 5.61, 5.9, 6.2)  # the first step warms up
    found = steps(job_of(tmp_path, [], [], ends=ends))
    assert (found.count, found.by_marks) == (5, True)
    assert found.p50 == pytest.approx(0.3)
    assert found.end - found.begin == pytest.approx(0.3, abs=1e-6)


def test_a_busy_part_replaces_unmarked_steps(tmp_path: Path) -> None:
    records = [operation(number, 0.01 * number, 0.005, 0.0) for number in range(1, 301)]
    found = steps(job_of(tmp_path, records, []))
    assert (found.count, found.by_marks) == (0, False)
    assert found.end - found.begin == pytest.approx(0.6)
    few = steps(job_of(tmp_path, records[:10], []))
    assert (few.begin, few.end) == (0.0, SECONDS)


def test_late_ranks_by_brute_force(tmp_path: Path) -> None:
    chance = random.Random(7)
    ranks: list[list[Record]] = [[], [], []]
    last: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for number in range(1, 201):
        arrivals = [chance.uniform(0, 0.01) + 0.002 * rank for rank in range(3)]
        tag = chance.choice(["x", "y"])
        if number % 10:  # otherwise one rank has not recorded it, and nothing is compared
            last[int(np.argmax(arrivals))].append(sorted(arrivals)[2] - sorted(arrivals)[1])
        for rank, arrival in enumerate(arrivals):
            if number % 10 or rank:
                ranks[rank].append(operation(number, 0.04 * number + arrival, 0.02, 0.01, tag=tag, ranks=3))
        ranks[0].append(operation(0, 0.04 * number, 0.001, 0.0, kind="send", ranks=3))
    found = skew(job_of(tmp_path, *ranks, size=3, hosts=["node0"] * 3))
    assert found.count == 180
    assert found.error_us == 0
    for late in found.ranks:
        own = last[late.rank]
        assert late.last == pytest.approx(len(own) / 180)
        assert late.median == pytest.approx(np.median(own))
        assert late.worst == pytest.approx(max(own))
        assert late.total == pytest.approx(sum(own))
    assert {each.name for each in found.operations} == {"all_reduce (x)", "all_reduce (y)"}
    assert sum(each.count for each in found.operations) == 180


def test_hosts_are_compared_on_one_clock(tmp_path: Path) -> None:
    chance = random.Random(8)
    ranks: list[list[Record]] = [[], []]
    for number in range(1, 101):
        arrivals = [0.05 * number + chance.uniform(0, 0.01), 0.05 * number + chance.uniform(0, 0.01)]
        done = max(arrivals) + 1e-4
        for rank, arrival in enumerate(arrivals):
            ranks[rank].append(operation(number, arrival, done + chance.uniform(0, 1e-4) - arrival, 0.0))
    truth = skew(job_of(tmp_path, *ranks, hosts=["a", "b"]))
    ahead = 500.0
    moved = [replace(r, t_issue=r.t_issue + ahead, t_done=r.t_done + ahead) for r in ranks[1]]
    save(tmp_path, 0, ranks[0], host="a", hosts=["a", "b"])
    known: dict[str, Any] = {
        "host": "b",
        "hosts": ["a", "b"],
        "began": BEGAN + ahead,
        "ended": BEGAN + ahead + SECONDS,
    }
    save(tmp_path, 1, moved, **known)
    found = skew(load_job(tmp_path))
    assert found.error_us is not None
    assert 100 <= found.error_us < 400
    for late, true in zip(found.ranks, truth.ranks, strict=True):
        assert late.total == pytest.approx(true.total, abs=100 * found.error_us / 1e6)


def test_nothing_stands_out(tmp_path: Path) -> None:
    records = [operation(n, 0.1 * n, 0.001, 0.0005) for n in range(1, 90)]
    job = job_of(tmp_path, records, records)
    assert not titles(job)
    assert "Nothing stands out" in report(job, "job")


def test_waits_that_are_spread_over_operations_are_named_together(tmp_path: Path) -> None:
    """Ten kinds, each waited for in 3 % of the time; the ranks come last by 20 ms in turns, every 100 ms."""
    ranks: list[list[Record]] = [[], []]
    for number in range(1, 101):
        for rank, records in enumerate(ranks):
            began, done = 0.02 * ((number + rank) % 2), 0.04
            one = operation(number, 0.1 * number - 0.1 + began, done - began, done - began)
            records.append(replace(one, tag=f"layer.{number % 10}"))
    job = job_of(tmp_path, *ranks)
    ((title, found),) = titles(job).items()
    assert title == "30% of the time waits for communication"
    assert "The most, 3.0%, is for all_reduce (layer." in found.text
    assert "10% of the time passes before the last rank" in found.text


@pytest.mark.parametrize("codec", ["bf16", "int8_block", "exp_window"])
def test_errors_of_codecs(codec: str) -> None:
    error = relative_error(codec)
    assert error is not None
    # Errors are uniform within half a step: of 8 bits in bf16, a 254th of a block's largest value in int8.
    assert {"bf16": 1e-3 < error < 2e-3, "int8_block": 1e-3 < error < 1e-2, "exp_window": error == 0}[codec]


def test_errors_that_nobody_can_measure() -> None:
    assert relative_error("powersgd") is None
    assert relative_error("of another package") is None


# -- the page -----------------------------------------------------------------------------------------------


class Checked(HTMLParser):
    """Fails for tags that do not match, and collects what a page would fetch or run."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        names = dict(attrs)
        if tag in ("script", "link", "img", "iframe") or {"src", "href", "onload"} & names.keys():
            self.outside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_is_whole_and_escapes_names(tmp_path: Path) -> None:
    bad = "<script>alert('x')</script>"
    codecs, kinds = ("bf16", None), ("all_reduce", "all_gather")
    records = [
        operation(n, 0.01 * n, 0.02, 0.008, tag=bad, codec=codecs[n % 2], kind=kinds[n % 2])
        for n in range(1, 600)
    ]
    row = expected("all_gather", "gloo", {"gloo": 1100.0, "msccl": 300.0}, {}, tag=bad)
    for rank in range(2):
        save(tmp_path, rank, records, tuple(0.1 * n for n in range(60)), choices=[row])
    write_report(tmp_path, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    checked = Checked(page)
    assert not checked.outside
    assert "http" not in page.replace(tmp_path.name, "")
    text = " ".join(checked.texts)
    for what in (
        "Rank 1",
        "What to change",
        "all_gather",
        bad,
        "bf16",
        "Late ranks",
        "59 steps",
        "3.7× faster",
    ):
        assert what in text
    assert "prefers-color-scheme: dark" in page
    # A step lasts 0.1 s, in which ten operations of two kinds overlap.
    assert 20 <= page.count("style='left:") <= 400


def test_a_million_operations_make_a_small_page(tmp_path: Path) -> None:
    """Tenfold operations in a step do not make the page longer: what is too near to tell apart is one bar."""
    sizes = []
    for count in (2_000, 20_000):
        records = [operation(n, 9.0 * n / count, 0.5 / count, 0.2 / count) for n in range(1, count + 1)]
        for rank in range(2):
            save(tmp_path, rank, records, tuple(0.9 * n for n in range(10)))
        sizes.append(len(report(load_job(tmp_path), "job")))
    assert sizes[1] < 2 * sizes[0] < 400_000


def test_a_recording_without_operations(tmp_path: Path) -> None:
    page = report(job_of(tmp_path, [], []), "job")
    Checked(page)
    assert "Nothing was recorded" in page


# -- files --------------------------------------------------------------------------------------------------


def test_a_missing_rank_is_a_finding(tmp_path: Path) -> None:
    save(tmp_path, 1, [operation(1, 1.0, 0.1, 0.0)])
    job = load_job(tmp_path)
    assert job.missing == (0,)
    assert "No file of rank 0" in report(job, "job")


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        load_job(tmp_path / "none")
    with pytest.raises(ConfigError, match="no recording in this folder"):
        load_job(tmp_path)
    good = save(tmp_path, 0, [operation(1, 1.0, 0.1, 0.0)])
    content = good.read_bytes()
    with np.load(good) as stored:
        arrays = {name: stored[name] for name in stored.files}
    about = json.loads(arrays["about"].tobytes())

    def saved(**changes: Any) -> bytes:
        changed = {name: column for name, column in {**arrays, **changes}.items() if column is not None}
        with good.open("wb") as file:
            np.savez(file, **changed)
        return good.read_bytes()

    def text(**changes: Any) -> Any:
        return np.frombuffer(json.dumps({**about, **changes}).encode(), np.uint8)

    refused = {
        content[:-200]: "truncated",
        content[:10]: "truncated",
        b"": "truncated",
        b"text": "truncated",
        saved(about=text(format=1)): "of another version of mcr_plus: format 1",
        saved(about=text(rank="0")): "rank: missing or malformed",
        saved(about=text(names=[])): "names: missing or malformed",
        saved(about=np.frombuffer(b"{", np.uint8)): "about: malformed",
        saved(about=None): "expected a file that mcr.record",
        saved(t_done=None): "column 't_done' is missing",
        saved(bytes=arrays["bytes"].astype("i4")): "column 'bytes' is missing or malformed",
        saved(waited=np.zeros(5)): "column 'waited' is missing or malformed",
        saved(kind=np.array([7], "i4")): "column 'kind' has entries without a name",
        saved(ranks=0 * arrays["ranks"]): "column 'ranks' has 0, expected numbers from 1",
        saved(bytes=-1 - arrays["bytes"]): "column 'bytes' has -",
        saved(tag=np.array([{}], object)): "column 'tag' is missing or malformed",  # no objects are unpickled
    }
    for bad, what in refused.items():
        good.write_bytes(bad)
        with pytest.raises(ConfigError, match=what) as caught:
            load_job(tmp_path)
        assert str(caught.value).startswith(str(good))
    good.write_bytes(content)
    (tmp_path / "again.npz").write_bytes(content)
    with pytest.raises(ConfigError, match="rank 0 is in"):
        load_job(tmp_path)
    (tmp_path / "again.npz").unlink()
    save(tmp_path, 1, [], size=4, hosts=["node0"] * 4)
    with pytest.raises(ConfigError, match="of a job of 4 ranks, but"):
        load_job(tmp_path)
    save(tmp_path, 1, [], job="of yesterday")
    with pytest.raises(ConfigError, match=r"rank1.npz: of job of yesterday, but .*rank0.npz of job 1f2e"):
        load_job(tmp_path)
    good.unlink()
    os.mkfifo(good)
    with pytest.raises(ConfigError, match="not a regular file"):
        load_job(tmp_path)


def test_ranks_prepare_a_folder_at_once(tmp_path: Path) -> None:
    """Also those of hosts or containers that share it, where processes have equal numbers."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: prepare_folder(tmp_path / "a" / "b"), range(400)))
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(InvalidArgument, match="record: cannot write into"):
            prepare_folder(folder)
    for wrong in (3, "a\0b"):
        with pytest.raises(InvalidArgument, match="record: expected the path of a folder, got "):
            prepare_folder(wrong)  # type: ignore[arg-type]
