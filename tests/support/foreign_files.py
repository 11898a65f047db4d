"""Fuzzing of every reader of files that others may have written.

    python tests/support/foreign_files.py [cases [seed [reader]]]

A reader may accept a damaged file, or refuse it with an `McrError` that names the file (status 2 of the
command). It must neither raise anything else nor allocate more than `most_bytes` of the file.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import re
import sys
import tempfile
import traceback
import tracemalloc
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml
from command import mcr_plus
from msccl_samples import all_pairs
from recordings import expected, operation, save
from steps import step_of

from mcr_plus.bucketing.saved import SavedBucket, SavedPlan
from mcr_plus.errors import McrError
from mcr_plus.msccl.writer import algorithm_text
from mcr_plus.tables.statistics import Timing
from mcr_plus.tuning.build_table import build_table
from mcr_plus.tuning.measurements import MeasurementFile, Sample, median_of_repeats
from mcr_plus.tuning.operations import BenchCase
from mcr_plus.tuning.plan import TableRequest
from mcr_plus.weight_sync import endpoint_file
from mcr_plus.weight_sync.shards import HeldShard, ShardAssignment

_DEEP: Final = 3_000
_ODD: Final[tuple[Any, ...]] = (
    None, True, False, -1, 0, 1, 1.5, -0.0, 1e308, float("nan"), float("inf"), 1 << 31, 1 << 63, -(1 << 63),
    10**19, 10**400, "", "x", "-1", "\ud800", "\x00", [], {}, [[]], [None], [1, 2], {"x": 1}, "0" * 5000,
)  # fmt: skip
_WORDS: Final = (
    b"\xff\xfe", b"\x00", b"-1", b"0", b"1e999", b"NaN", b"99999999999999999999", b"9" * 5000, b"\n", b",",
    b":", b"[", b"]", b"{", b"}", b'"', b"#", b"&a", b"*a", b"!!x ", b"<", b">", b"[" * _DEEP,
    b'{"a":' * _DEEP, b"- " * 99, b"%", b"\t", b"\\ud800", "é".encode(), "\u2028".encode(),
)  # fmt: skip


def most_bytes(size: int) -> int:
    """Return the most bytes that a reader may allocate for a file of this size."""
    return (64 << 20) + 8 * size


# -- damage -------------------------------------------------------------------------------------------------


def damaged(content: bytes, kind: str, chance: random.Random) -> bytes:
    """Return a mutant of the content of a file of this kind: json, lines, npz, yaml or text."""
    if kind == "npz":
        return _npz(content, chance)
    if kind.endswith(".gz"):
        if chance.random() < 0.3:
            return _bytes(content, chance)
        return gzip.compress(damaged(gzip.decompress(content), kind.removesuffix(".gz"), chance), mtime=0)
    if chance.random() < 0.6 and kind in ("json", "yaml"):
        return _structured(content, kind, chance)
    if chance.random() < 0.6 and kind == "lines":
        lines = content.split(b"\n")
        place = chance.randrange(len(lines))
        lines[place] = _structured(lines[place] or b"{}", "json", chance)
        return b"\n".join(lines)
    return _bytes(content, chance)


def _bytes(content: bytes, chance: random.Random) -> bytes:
    """Change some places: flip bits, cut or repeat spans, insert words such as numbers or brackets."""
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        at = chance.randrange(len(content) + 1)
        end = min(len(content), at + chance.choice((1, 2, 8, 100)))
        match chance.randrange(8):
            case 0 if at < len(content):
                content = content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
            case 1:
                content = content[:at]
            case 2:
                content = content[:at] + content[end:]
            case 3:
                content = content[:at] + content[at:end] * chance.choice((2, 3, 50)) + content[end:]
            case 4:
                content = content[:at] + chance.choice(_WORDS) + content[at:]
            case 5:
                numbers = [place for place, byte in enumerate(content) if 48 <= byte < 58]
                if numbers:
                    at = chance.choice(numbers)
                    content = content[:at] + chance.choice(_WORDS[2:8]) + content[at + 1 :]
            case 6 if chance.random() < 0.05:
                content = b""
            case _:
                content = content[:at] + chance.randbytes(end - at) + content[end:]
    return content


def _structured(content: bytes, kind: str, chance: random.Random) -> bytes:
    """Change values of a document: to another type, to values of other places, or remove them."""
    data = json.loads(content) if kind == "json" else yaml.safe_load(content)
    for _ in range(chance.choice((1, 1, 2))):
        places = list(_places(data))
        if not places:
            break
        holder, key = chance.choice(places)
        match chance.randrange(6):
            case 0:
                del holder[key]
            case 1:
                other, its_key = chance.choice(places)
                there = other[its_key] if its_key in other or isinstance(other, list) else None
                holder[key] = json.loads(json.dumps(there))
            case 2 if isinstance(holder, list):
                holder.insert(0, holder[key])
            case 2:
                holder[str(chance.choice(("", "x", f"{key}s", -1)))] = holder.pop(key)
            case 3:
                value: Any = 1
                for _ in range(chance.choice((10, 40, 400))):
                    value = [value] if kind == "json" else {"a": value}
                holder[key] = value
            case _:
                holder[key] = chance.choice(_ODD)
    if kind == "json":
        return json.dumps(data).encode()
    try:
        return str(yaml.safe_dump(data, sort_keys=False)).encode(errors="surrogatepass")
    except RecursionError:
        return content


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the containers of a document with each of their keys."""
    waiting = [data]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            yield holder, key
            if isinstance(holder[key], (dict, list)):
                waiting.append(holder[key])


def _npz(content: bytes, chance: random.Random) -> bytes:
    """Change bytes of an archive, or one of its members: its header, its content, its stated size."""
    if chance.random() < 0.3:
        return _bytes(content, chance)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    name = chance.choice(list(members))
    end = 10 + int.from_bytes(members[name][8:10], "little")
    header, data = members[name][:end], members[name][end:]
    if name == "about.npy" and chance.random() < 0.7:
        data = _structured(data, "json", chance) if chance.random() < 0.8 else _bytes(data, chance)
        header = _header(f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({len(data)},), }}")
        members[name] = header + data
    else:
        members[name] = _member(header, data, chance)
    if chance.random() < 0.1:
        del members[name]
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for each, text in members.items():
            archive.writestr(each, text)
    found = bytearray(written.getvalue())
    if chance.random() < 0.2:  # the stated size in the directory at the end of the archive
        at = found.rfind(b"PK\x01\x02")
        found[at + 24 : at + 28] = chance.choice(
            (b"\xff\xff\xff\x7f", b"\x00\x00\x00\x00", b"\x01\x00\x00\x40")
        )
    return bytes(found)


def _member(header: bytes, data: bytes, chance: random.Random) -> bytes:
    shape = chance.choice(
        ("()", "(2147483648,)", "(99999999999999,)", "(1, 1)", "(-1,)", "(2.5,)", "(1,", "(" * 90)
    )
    descr = chance.choice(("|O", "<U4", "|S5", "<f8", "<i4", "|b1", "<M8[s]", "<f16", "x", "<i8"))
    match chance.randrange(7):
        case 0:
            return data
        case 1:
            return _header(f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}") + data
        case 2:
            return _header(f"{{'descr': '<f8', 'fortran_order': True, 'shape': {shape}, }}") + data
        case 3:
            return header + _bytes(data, chance)
        case 4:
            return header[:8] + b"\xff\xff" + header[10:] + data
        case 5:
            array = np.array(chance.choice((0, "x", b"x", [[1]], [1.5, 2.5], [float("nan")])))
            file = io.BytesIO()
            np.save(file, array)
            return file.getvalue()
    return _bytes(header, chance) + data


def _header(text: str) -> bytes:
    line = text.encode() + b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line


# -- readers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """A reader: its file, the kind of damage, the content, and how the file is read."""

    file: str
    kind: str
    content: Callable[[Path], bytes]
    read: Callable[[Path], None]


def _command(*words: str, good: tuple[int, ...] = (0, 2)) -> Callable[[Path], None]:
    """Return a reader that runs the command `words`, in which FILE, FOLDER and OUT are paths."""

    def read(path: Path) -> None:
        out = path.parent.parent / "out"
        names = {"FILE": path, "FOLDER": path.parent, "OUT": out, "STEP": path.parent / "step.json"}
        answer = mcr_plus(*(names.get(word, word) for word in words))
        assert answer.returncode in good, f"status {answer.returncode}: {answer.stderr}"
        if answer.returncode == 2 and "Invalid value: ranks: 8, but" not in answer.stderr:
            unwrapped = re.sub(r"[\s│]", "", answer.stderr)
            assert path.name in unwrapped, f"the file is not named: {answer.stderr}"

    return read


def _recording(folder: Path) -> bytes:
    many = [operation(number, 0.1 * number, 0.05, 0.01, tag=f"t{number % 3}") for number in range(1, 60)]
    rows = [expected("all_reduce", "gloo", {"gloo": 30.0, "mpi": 10.0}, {"gloo": 25.0, "mpi": 9.0})]
    for rank in (1, 0):
        path = save(folder, rank, many, (2.0, 4.0), choices=[] if rank else rows)
    return path.read_bytes()


def _dump(folder: Path) -> bytes:
    frames = [{"name": "step", "filename": "train.py", "line": 7}]
    mine = {
        "kind": "all_reduce", "operation": "all_reduce of 4", "reduce_op": "SUM", "root": None, "tag": "x",
        "backend": "gloo", "shape": [4], "dtype": "float32", "state": "started", "issued_ns": 10**9,
        "waited": 2.0, "waits": True, "error": "", "peer": None, "match_tag": 0,
    }  # fmt: skip
    message = {**mine, "kind": "send", "peer": 1, "frames": frames}
    for rank in (1, 0):
        group = {
            "ranks": [0, 1], "issued": 1, "peers": {"0": 1, "1": 1}, "failed": "", "messages": [message],
        }  # fmt: skip
        own = {
            "format": 1, "job": "j", "rank": rank, "world_size": 2, "host": "a", "hosts": ["a", "a"],
            "written_by": rank, "time_ns": 2 * 10**9, "reason": "asked", "error": None, "processes": {},
            "threads": [{"name": "MainThread", "frames": frames}], "groups": {"world": group},
        }  # fmt: skip
        entry = {
            "is_p2p": False, "collective_seq_id": 1, "process_group": ["world", "world"], "frames": frames,
            "mcr": mine,
        }  # fmt: skip
        content = json.dumps({"entries": [entry], "mcr": own}).encode()
        (folder / f"rank.{rank}.json").write_bytes(content)
    return content


def _trace(folder: Path) -> bytes:
    """Return a trace of torch's profiler with two steps."""
    dims = {"Input Dims": [[1000]], "Input type": ["float"], "Record function id": 3}
    sent = {
        "Collective name": "allreduce", "In msg nelems": 1000, "dtype": "Float", "Process Group Name": "0",
        "Process Group Ranks": "[0, 1]", "Group size": 2,
    }  # fmt: skip
    events: list[dict[str, Any]] = []
    for step in range(3):
        rows: list[tuple[str, int, int, str, dict[str, Any]]] = [
            (f"ProfilerStep#{step}", 0, 39_000, "user_annotation", {}),
            ("aten::mm", 0, 20_000, "cpu_op", {}),
            ("torch::autograd::AccumulateGrad", 20_000, 20_010, "cpu_op", dims),
            ("c10d::allreduce_", 20_020, 27_000, "cpu_op", sent),
            ("nn.Module: Linear_0", 0, 10_000, "python_function", {}),
            ("Optimizer.step#SGD.step", 28_000, 32_000, "user_annotation", {}),
        ]
        for name, begin, end, cat, args in rows:
            at = 1.7e15 + 40_000 * step + begin
            times = {"ts": at, "dur": end - begin}
            events.append({"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": 1, **times, "args": args})
    about = {"rank": 0, "world_size": 2, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}
    return json.dumps({"schemaVersion": 1, "distributedInfo": about, "traceEvents": events}).encode()


def _log(folder: Path) -> bytes:
    args = {
        "kind": "all_reduce", "sequence": 1, "bytes": 4096, "t_issue": 1.0, "t_done": 1.1, "group": "world",
        "error": None,
    }  # fmt: skip
    events = [
        {
            "ph": phase,
            "ts": at,
            "name": "all_reduce",
            "pid": 0,
            "tid": 0,
            "id": 1,
            "cat": "collective",
            "args": args,
        }
        for phase, at in (("b", 1e6), ("e", 1.1e6))
    ]
    for rank in (1, 0):
        about = {"format": 1, "rank": rank, "host": f"n{rank}", "epoch_us": 1.7e15, "size": 2}
        content = json.dumps({"traceEvents": events, "otherData": about}).encode()
        (folder / f"rank{rank}.json").write_bytes(content)
    return content


def _step(folder: Path) -> bytes:
    step = step_of([("a", 4000, 0.01), ("b", 8000, 0.02)], forward=0.01, after=0.005, seconds=0.002)
    step.save(folder / "step.json")
    return (folder / "step.json").read_bytes()


def _plan(folder: Path) -> bytes:
    path = folder / "plan.json"
    SavedPlan(model="0" * 16, ranks=2, buckets=(SavedBucket(params=("a", "b"), library="gloo"),)).save(path)
    return path.read_bytes()


_HERE: Final = {"mcr_plus": ("1",), "ranks": ("2",)}


def _samples(folder: Path) -> bytes:
    path = folder / "m.jsonl"
    MeasurementFile(path, _HERE, fresh=True).add(
        [
            Sample(BenchCase("all_reduce", 8), "mpi", False, Timing.of([1.0, 2.0, 3.0])),
            Sample(BenchCase("send", 8, "int8"), "gloo", False, None, "wrong result on rank 1"),
        ]
    )
    return path.read_bytes()


def _invitation(folder: Path) -> bytes:
    whole = [HeldShard("w", (8, 4), "float32"), HeldShard("b", (3,), "bfloat16")]
    parts = [
        ShardAssignment(0, (endpoint_file.WHOLE,), each.dtype, [(each.name, each.bounds)]) for each in whole
    ]
    offers = [endpoint_file.ShardOffer("all of all tensors", endpoint_file.WHOLE, whole)]
    made = endpoint_file.EndpointFile.of("t", 1.0, b"k" * 32, 10.0, {0: ("127.0.0.1", 1234)}, offers, parts)
    return made.model_dump_json(exclude_none=True).encode()


def _read_invitation(path: Path) -> None:
    path.chmod(0o600)
    found = endpoint_file.read(str(path))
    assert found is not None
    found.choose([HeldShard("w", (8, 4), "float32"), HeldShard("b", (3,), "bfloat16")])


def _text(text: str) -> Callable[[Path], bytes]:
    return lambda folder: text.encode()


_CONFIG = """version: 1
pipeline:
  - fuse: {bucket: 4MiB, memory: 64MiB}
  - compress: {codec: int8_block, min_bytes: 64KiB, block: 128}
  - select: {backends: [gloo, msccl], vector_size: 64KiB}
  - dispatch: {timeout: 8s, wait: auto}
rules:
  - {match: {kind: all_reduce, bytes: ">=1MiB"}, use: {compress: {codec: none}, select: {backend: gloo}}}
"""
_TABLE = """version: 1
fingerprint: {mcr_plus: "1", ranks: 2}
rules:
  - {kind: all_reduce, bytes: 0..4KiB, backend: mpi, ranks: 2..8, measured: {mpi: {8: 1.5, 1KiB: 2.0}}}
  - {kind: all_reduce, bytes: 4KiB.., backend: "msccl:ring", async: true, reason: "faster"}
  - {kind: "*", bytes: 0.., backend: gloo}
"""
_CLUSTER = """version: 1
nodes: 4
ranks_per_node: 2
links:
  inside: {rate: 20GB/s, latency: 2us}
  nic: {rate: 100Gbit/s, latency: 5us, per: node}
  rack: {nodes: 2, uplink: 400Gbit/s}
"""
_NCCL = """# collective,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff
allreduce,0,65535,ring,ll,2,1,8
allreduce,65536,18446744073709551615,tree,simple,8,-1,-1,1,0
broadcast,0,4294967295,ring,simple,-1,2,-1
"""
_OPENMPI = """2 # collectives
2 # allreduce
2 # communicator sizes
0 # ranks
2 # message sizes
0 3 0 0
65536 4 0 0
8 # ranks
1
0 6 0 0
7
1
0
2
0 3 4 65536
1048576 9 0 0
"""
_UCC = """UCC_TL_UCP_TUNE=allreduce:0-4K:@knomial#allreduce:4K-inf:host:[2-8]:@sra_knomial
UCC_TL_NCCL_TUNE=allreduce,bcast:cuda:inf
[vendor=intel model=skylake team_size=4 ppn=2 nnodes=2]
UCC_TL_UCP_ALLREDUCE_KN_RADIX=2
UCC_TL_UCP_TUNE=bcast:0-4k:@0#bcast:4k-inf:@1
"""
_ONECCL = """CCL_ALLREDUCE="recursive_doubling:0-8192;rabenseifner:8193-1048576;ring:1048577-max"
CCL_BCAST=double_tree
"""


def _use_plan(path: Path) -> None:
    SavedPlan.load(path)


def _use_samples(path: Path) -> None:
    found = MeasurementFile(path, _HERE, fresh=False).samples
    if not any(each.timing and each.candidate in ("mpi", "gloo") for each in found):
        return
    request = TableRequest(("all_reduce",), 8, 8, 2, ("mpi", "gloo"), asynchronous=False)
    build_table(request, median_of_repeats(found), _HERE, 1)


_PLANNED = _command("plan", "FILE", "--json", good=(0, 1, 2))
_MERGED = _command("trace", "merge", "FILE", "-o", "OUT")
READERS: Final[dict[str, Reader]] = {
    "recording": Reader("rank0.npz", "npz", _recording, _command("report", "FOLDER", "-o", "OUT")),
    "dump": Reader("rank.0.json", "json", _dump, _command("diagnose", "FOLDER", good=(0, 1, 2))),
    "log": Reader("rank0.json", "json", _log, _command("trace", "merge", "FOLDER", "-o", "OUT")),
    "profile": Reader("t.json", "json", _trace, _MERGED),
    "packed profile": Reader("t.json.gz", "json.gz", lambda folder: gzip.compress(_trace(folder)), _MERGED),
    "trace": Reader("t.json", "json", _trace, _PLANNED),
    "packed trace": Reader("t.json.gz", "json.gz", lambda folder: gzip.compress(_trace(folder)), _PLANNED),
    "step": Reader("step.json", "json", _step, _PLANNED),
    "plan": Reader("plan.json", "json", _plan, _use_plan),
    "configuration": Reader("c.yaml", "yaml", _text(_CONFIG), _command("validate", "FILE")),
    "table": Reader("t.yaml", "yaml", _text(_TABLE), _command("table", "show", "FILE")),
    "cluster": Reader(
        "cluster.yaml",
        "yaml",
        lambda folder: _step(folder) and _CLUSTER.encode(),
        _command("plan", "STEP", "--topology", "FILE", "--ranks", "8", good=(0, 1, 2)),
    ),
    "measurements": Reader("m.jsonl", "lines", _samples, _use_samples),
    "algorithm": Reader(
        "a.xml",
        "text",
        lambda _: algorithm_text(all_pairs(3)).encode(),
        _command("msccl", "verify", "FILE", good=(0, 1, 2)),
    ),
    "invitation": Reader("i.json", "json", _invitation, _read_invitation),
    **{
        name: Reader(
            "f.conf", "text", _text(text), _command("table", "import", "FILE", "--format", name, "-o", "OUT")
        )
        for name, text in (("nccl-csv", _NCCL), ("openmpi", _OPENMPI), ("ucc", _UCC), ("oneccl", _ONECCL))
    },
}


# -- runs ---------------------------------------------------------------------------------------------------


@dataclass
class Fault:
    """A reader's wrong reaction to a mutant."""

    reader: str
    number: int
    what: str
    content: bytes


def fault_of(reader: Reader, path: Path) -> str:
    """Read a file; return the fault of the reader, empty without one."""
    try:
        reader.read(path)
    except McrError as error:
        return "" if path.name in str(error) else f"the file is not named: {error}"
    except AssertionError as error:
        return str(error)
    except BaseException:
        return traceback.format_exc()
    return ""


def faults(reader: str, numbers: range, seed: int, folder: Path) -> Iterator[Fault]:
    """Yield the faults of one reader with the mutants of these numbers."""
    about = READERS[reader]
    place = folder / reader.replace(" ", "-")
    place.mkdir()
    content = about.content(place)
    path = place / about.file
    path.write_bytes(content)
    about.read(path)  # imports what it needs
    tracemalloc.start()
    try:
        for number in numbers:
            mutant = damaged(content, about.kind, random.Random(f"{seed} {reader} {number}"))
            path.write_bytes(mutant)
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            what = fault_of(about, path)
            used = tracemalloc.get_traced_memory()[1] - before
            if used > most_bytes(len(mutant)):
                what += f"{used:,} bytes for {len(mutant):,}"
            if what:
                yield Fault(reader, number, what, mutant)
    finally:
        tracemalloc.stop()


def main(cases: int = 10_000, seed: int = 1, only: str = "") -> int:
    """Print the faults of all readers, and their number."""
    names = [only] if only else list(READERS)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            for fault in faults(name, range(-(-cases // len(names))), seed, Path(folder)):
                found[name] += 1
                if found[name] <= 5:
                    print(f"{name} {fault.number}: {fault.what[-1500:]}")
                    print(f"    {fault.content[:300]!r}")
            print(f"{name}: {-(-cases // len(names))} mutants, {found[name]} faults", flush=True)
    return sum(found.values())


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:3]] + [10_000, 1][len(sys.argv) - 1 :]
    sys.exit(bool(main(numbers[0], numbers[1], *sys.argv[3:4])))
