"""Snapshots in the format of torch's Flight Recorder, which `torchfrtrace` and other tools read.

The format lacks fields for some of the properties that ranks must agree on. `profiling_name` must be a kind
and a library known to torch, so it always begins with `gloo:`; reduce op, root, tag and the real library
stand in `desc`, and in `mcr` for programs. The entries hold only operations that torch's analysis can pair:
it expects every operation of a group on all of its ranks, in the order of their numbers. A send or receive is
therefore written as an operation of a group of two, and only those in flight are listed; completed ones, and
receives from any rank, are under `mcr` alone.

Verified against torch's analysis in 2.13; the version of the format is the one that torch 2.13 writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from mcr_plus.core.kinds import ROOTED, SCALAR_TYPES, VECTOR, collective, dtype_name, plain_kind
from mcr_plus.core.stacks import Frame

if TYPE_CHECKING:
    from mcr_plus.core.message import Signature
    from mcr_plus.observe.snapshot import GroupSnapshot, Snapshot, SnapshotEntry

VERSION: Final = "2.10"
OURS: Final = 1
"""Version of the part under `mcr`."""

_NAMES: Final = {
    "all_gather": "_all_gather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "all_to_all": "all_to_all_single",
    "all_to_all_v": "all_to_all_v_single",
    **{vector: plain_kind(vector) for vector in VECTOR & ROOTED},
}
"""Torch's names of kinds, where they differ from ours."""


def flight_record(snapshot: Snapshot, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank's dump: plain data that can be pickled and written as JSON.

    `about`: description of the process and its job, for `mcr`.
    """
    configs: dict[str, dict[str, str]] = {}
    records: list[dict[str, Any]] = []
    for number, group in enumerate(snapshot.groups):
        configs[group.name] = _config(group.name, group.name, group.ranks)
        records += [_collective(group, entry, number) for entry in group.entries]
        for pair, record in _messages(group, number):
            configs[record["process_group"][0]] = _config(record["process_group"][0], group.name, pair)
            records.append(record)
    records.sort(key=lambda record: record["time_created_ns"])
    for index, record in enumerate(records):  # ids count from 0: all ranks must begin with the same id
        record["record_id"] = record["op_id"] = index
    return {
        "version": VERSION,
        "pg_config": configs,
        "pg_status": {str(index): _status(group) for index, group in enumerate(snapshot.groups)},
        "entries": records,
        "host_name": about["host"],
        "mcr": {
            "format": OURS,
            **about,
            "time_ns": snapshot.time,
            "reason": snapshot.reason,
            "error": _error(snapshot.error),
            "threads": [{"name": name, "frames": _frames(frames)} for name, frames in snapshot.threads],
            "groups": {group.name: _group(group) for group in snapshot.groups},
        },
    }


def _config(name: str, group: str, ranks: Sequence[int]) -> dict[str, str]:
    return {"name": name, "desc": f"mcr:{group}", "ranks": str(list(ranks))}


def _status(group: GroupSnapshot) -> dict[str, Any]:
    done = [entry.number for entry in group.entries if entry.state == "completed"]
    started = [entry.number for entry in group.entries if entry.state != "scheduled"]
    return {
        "last_enqueued_collective": group.issued,
        "last_started_collective": max(started, default=-1),
        "last_completed_collective": max(done, default=-1),
    }


def _collective(group: GroupSnapshot, entry: SnapshotEntry, number: int) -> dict[str, Any]:
    kind = entry.signature.kind
    return _record(
        entry,
        number,
        group=(group.name, f"mcr:{group.name}"),
        name=_NAMES.get(kind, kind),
        sequence=entry.number,
        sizes=_sizes(entry.signature),
    )


def _messages(group: GroupSnapshot, number: int) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
    """Yield the sends and receives in flight, each with its two ranks, in a group of these two.

    The n-th send in a direction, by tags, has the same number at both ends, and a separate number in the
    group: odd for sends to higher ranks, even for sends to lower ranks.
    """
    counted: Counter[tuple[str, bool]] = Counter()
    own = group.ranks[group.rank]
    for entry in sorted(group.messages, key=lambda entry: entry.match_tag):
        if entry.state == "completed" or entry.peer is None or entry.peer == group.rank:
            continue
        other = group.ranks[entry.peer]
        sends = entry.signature.kind == "send"
        low, high = sorted((own, other))
        me, you = int(own == high), int(other == high)
        name, upwards = (f"send {me}->{you}", me < you) if sends else (f"recv {me}<-{you}", you < me)
        pair = f"{group.name}:{low}-{high}"
        counted[pair, upwards] += 1
        shape = [list(entry.signature.shape)]
        yield (
            (low, high),
            _record(
                entry,
                number,
                group=(pair, f"mcr:{group.name}"),
                name=name,
                sequence=2 * counted[pair, upwards] - upwards,
                sizes=(shape, []) if sends else ([], shape),
            ),
        )


def _record(
    entry: SnapshotEntry,
    number: int,
    *,
    group: tuple[str, str],
    name: str,
    sequence: int,
    sizes: tuple[list[list[int]], list[list[int]]],
) -> dict[str, Any]:
    signature = entry.signature
    dtype = dtype_name(signature.dtype)
    dtypes = [] if signature.dtype is None else [SCALAR_TYPES.get(dtype, dtype)]
    return {
        "record_id": 0,
        "pg_id": number,
        "process_group": group,
        "collective_seq_id": sequence,
        "p2p_seq_id": sequence if signature.is_p2p else 0,
        "op_id": 0,
        "profiling_name": f"gloo:{name}",
        "desc": f"{signature.choice or 'mcr'}: {signature.describe()}",
        "time_created_ns": entry.issued,
        "input_sizes": sizes[0],
        "input_dtypes": dtypes if sizes[0] else [],
        "output_sizes": sizes[1],
        "output_dtypes": dtypes if sizes[1] else [],
        "state": entry.state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": entry.state == "completed",
        "timeout_ms": 0,
        "is_p2p": signature.is_p2p,
        "frames": _frames(entry.frames),
        "mcr": _own(entry),
    }


def _own(entry: SnapshotEntry) -> dict[str, Any]:
    """Return the fields that torch's format lacks."""
    signature = entry.signature
    return {
        "kind": signature.kind,
        "operation": signature.describe(),
        "reduce_op": signature.reduce_op,
        "root": signature.root,
        "tag": signature.tag,
        "backend": signature.choice,
        "shape": list(signature.shape),
        "dtype": dtype_name(signature.dtype),
        "peer": entry.peer,
        "match_tag": entry.match_tag,
        "state": entry.state,
        "issued_ns": entry.issued,
        "waited": round(entry.waited, 6),
        "waits": entry.waits,
        "error": entry.error,
    }


def _sizes(signature: Signature) -> tuple[list[list[int]], list[list[int]]]:
    """Return the sizes of input and output on the root: torch's analysis expects equal sizes on all ranks.

    For vector collectives, the size of one row, because the number of rows differs between ranks.
    """
    shape = list(signature.shape)
    if signature.kind == "barrier":
        return [], []
    if signature.kind in VECTOR:
        return [shape], [shape]
    if signature.kind == "all_to_all":  # `shape` covers the parts for all ranks
        return [shape], [shape]
    form = {"none": [], "one": [shape], "each": [[signature.ranks, *shape]]}
    sends, receives = collective(signature.kind).buffers()
    return form[sends], form[receives]


def _group(group: GroupSnapshot) -> dict[str, Any]:
    return {
        "ranks": list(group.ranks),
        "rank": group.rank,
        "issued": group.issued,
        "peers": {str(rank): issued for rank, issued in group.peers.items()},
        "failed": group.failed,
        "messages": [_own(entry) | {"frames": _frames(entry.frames)} for entry in group.messages],
    }


def _frames(frames: Sequence[tuple[str, str, int]]) -> list[dict[str, Any]]:
    return [Frame(*frame)._asdict() for frame in frames]


def _error(error: BaseException | None) -> dict[str, Any] | None:
    if error is None:
        return None
    named = {"kind": type(error).__name__, "text": str(error)}
    ranks = {name: list(getattr(error, name)) for name in ("ranks", "missing") if hasattr(error, name)}
    return named | ranks
