"""Dumps on behalf of ranks that cannot write one: their process is stopped, dead or unreachable.

Torch's analysis needs a dump of every rank. The boards of its groups show how many operations such a rank has
issued; its dump has the writer's operations up to that number, without frames. An operation that the writer
still waits for gets a different state from the writer's, so that the analysis names the rank. The status page
of a stopped process shows where its program was, at most half a second earlier. `mcr.written_by` names the
rank that wrote a dump.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mcr_plus.board.shared import SharedBoard
from mcr_plus.core.stacks import Frame
from mcr_plus.hosts.page import page_of
from mcr_plus.observe.files import files_of

if TYPE_CHECKING:
    from mcr_plus.engine.engine import Engine
    from mcr_plus.rendezvous.world import World

AWAY: Final = ("stopped", "dead", "silent")
"""States of processes that cannot write a dump."""


def substitutes(
    record: Mapping[str, Any], engine: Engine, world: World, folder: str
) -> dict[int, dict[str, Any]]:
    """Return the dumps that this rank writes for other ranks, by rank; `record` is its own dump.

    On each host the first rank that can write writes them all. A rank's own dump is kept if the rank has
    issued nothing since.
    """
    status = {int(rank): each for rank, each in record["mcr"]["processes"].items()}
    here = [rank for rank, host in enumerate(world.hosts) if host == world.hosts[world.rank]]
    if any(rank < world.rank and status[rank] not in AWAY for rank in here):
        return {}
    found = {}
    for rank, state in status.items():
        if state in AWAY:
            issued = _issued(record, engine, rank)
            if not _has_written(files_of(os.path.join(folder, ""), rank).text, record, rank, issued):
                found[rank] = _substitute(record, rank, state, issued)
                process, own = (engine.peers.processes[each] for each in (rank, world.rank))
                if state == "stopped" and process.place == own.place:
                    found[rank]["mcr"]["threads"] = _last_seen(process.pid)
    return found


def _last_seen(process: int) -> list[dict[str, Any]]:
    """Return the last known place of a stopped process, as a dump's only thread; empty if unknown."""
    page = page_of(process)
    try:
        frames = [Frame(*frame)._asdict() for frame in page.picture["frames"]] if page is not None else []
    except (KeyError, TypeError):  # a page of another version
        frames = []
    return [{"name": "last seen", "frames": frames}] if frames else []


def _issued(record: Mapping[str, Any], engine: Engine, rank: int) -> dict[str, int]:
    """Return the number of collectives that a rank has issued, by group that this process shares."""
    found = {}
    for state in list(engine.states):
        group = state.group
        if state.closed or rank not in group.local or group.name not in record["mcr"]["groups"]:
            continue
        if isinstance(state.board, SharedBoard) or not engine.peers.is_away(0):  # rank 0 serves the store
            found[group.name] = state.board.read(group.local[rank], state.sequence).issued
    return found


def _has_written(path: Path, record: Mapping[str, Any], rank: int, issued: Mapping[str, int]) -> bool:
    try:
        theirs = json.loads(path.read_bytes())["mcr"]
        return (theirs["job"], theirs["written_by"]) == (record["mcr"]["job"], rank) and {
            name: group["issued"] for name, group in theirs["groups"].items() if name in issued
        } == issued
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _substitute(
    record: Mapping[str, Any], rank: int, status: str, issued: Mapping[str, int]
) -> dict[str, Any]:
    own = record["mcr"]
    entries = [
        _entry(entry)
        for entry in record["entries"]
        if not entry["is_p2p"] and entry["collective_seq_id"] <= issued.get(entry["process_group"][0], 0)
    ]
    for index, entry in enumerate(entries):
        entry["record_id"] = entry["op_id"] = index
    groups = {
        name: {
            "ranks": group["ranks"],
            "rank": group["ranks"].index(rank),
            "issued": issued[name],
            "peers": {},
            "failed": "",
            "messages": [],
        }
        for name, group in own["groups"].items()
        if name in issued
    }
    return {
        **record,
        "pg_config": {name: config for name, config in record["pg_config"].items() if name in issued},
        "pg_status": {},
        "entries": entries,
        "host_name": own["hosts"][rank],
        "mcr": {
            **own,
            "rank": rank,
            "host": own["hosts"][rank],
            "pid": None,
            "written_by": own["rank"],
            "reason": f"its process is {status}: written by rank {own['rank']}",
            "error": None,
            "threads": [],
            "groups": groups,
        },
    }


def _entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the writer's entry as the other rank's entry; only its number is known."""
    state = entry["state"]
    if state != "completed":
        state = "scheduled" if state == "started" else "started"
    mcr = {**entry["mcr"], "state": state, "waited": 0.0, "waits": False, "error": ""}
    return {**entry, "state": state, "retired": state == "completed", "frames": [], "mcr": mcr}
