"""The running jobs of this user on this host, from the status pages of their ranks.

Reads only /proc and the pages, so ranks do not notice, and hanging or stopped ranks appear as well.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from mcr_plus.core.proc import read_stat, state_of, tracer_of
from mcr_plus.errors import InvalidArgument
from mcr_plus.hosts.page import NAME, Shown, Unreadable, read_at
from mcr_plus.hosts.page_exchange import HOSTS
from mcr_plus.observe.remote_status import RemoteStatus

State = Literal[
    "waiting", "inside", "outside", "busy", "stopped", "dead", "gone", "silent", "running", "unknown"
]
LOST: Final = ("stopped", "dead", "gone", "silent")
_MEMORY: Final = f"/memfd:{NAME} ", f"/memfd:{HOSTS} "
_OF_AGENTS: Final[Mapping[str, State]] = {
    "running": "running",
    "stopped": "stopped",
    "dead": "dead",
    "silent": "silent",
    "left": "gone",
}
_STALE: Final = 3.0  # seconds without a new picture after which a running rank counts as busy


@dataclass(frozen=True)
class Line:
    """A place in the user's program."""

    function: str
    file: str
    line: int


@dataclass(frozen=True)
class RankWait:
    """A wait of a rank.

    Attributes:
        number: number of the operation in its group; 0 for sends and receives.
        seconds: duration of the wait so far.
        waits_for: ranks of the job that have not issued the operation, or the peer of a message; if all have
            issued it, the operation's lost members.
        issued: by rank of `waits_for`, the number of its last operation in the group, where known.
        missing: the number of these ranks; `waits_for` names at most the first few of very many.
        started: whether the operation has been given to its library.
        timeout: the deadline of the wait, in seconds.
    """

    group: str
    number: int
    operation: str
    library: str
    seconds: float
    waits_for: tuple[int, ...]
    issued: Mapping[int, int]
    missing: int
    started: bool
    timeout: float


@dataclass(frozen=True)
class GroupTraffic:
    """The operations of a rank in one group.

    Attributes:
        issued: number of the last collective operation.
        last: description of that operation, as in messages.
        idle: seconds since the last issue; None if nothing was ever issued.
        operations_per_s, bytes_per_s: over the last four seconds. Bytes follow the convention of nccl-tests;
            for vector collectives they are estimated from every 16th.
        in_flight: number of incomplete asynchronous operations.
    """

    name: str
    size: int
    ranks: tuple[int, ...]
    issued: int
    last: str
    idle: float | None
    operations_per_s: float
    bytes_per_s: float
    in_flight: int


@dataclass(frozen=True)
class Member:
    """A rank of a job.

    Attributes:
        seen: age of its page's content, in seconds; None if it has no page here.
        idle: seconds since it was last seen inside mcr_plus.
        call: the function of mcr_plus that its program is in; empty if none.
        lines: the place of its program, without library functions, innermost first.
        frames: the same with library functions, except those of mcr_plus.
        error: the error of its first failed group; empty if none has failed.
        dumped: its last dump, see `Recorder`; empty without one.
        tracer: the process, such as a debugger, that has stopped it; 0 if there is none on this host.
    """

    rank: int
    host: str
    pid: int
    state: State
    seen: float | None = None
    idle: float | None = None
    waits: tuple[RankWait, ...] = ()
    call: str = ""
    lines: tuple[Line, ...] = ()
    frames: tuple[Line, ...] = ()
    groups: tuple[GroupTraffic, ...] = ()
    more_groups: int = 0
    error: str = ""
    dumped: Mapping[str, str] = field(default_factory=dict)
    tracer: int = 0

    @property
    def line(self) -> Line | None:
        """Return the current line of the program."""
        return self.lines[0] if self.lines else None


@dataclass(frozen=True)
class ObservedJob:
    """A job as its ranks on this host show it. `seconds`: its age. `here`: the ranks of this host."""

    id: str
    version: str
    hosts: tuple[str, ...]
    seconds: float
    members: tuple[Member, ...]
    here: tuple[int, ...] = ()

    def member(self, rank: int) -> Member:
        """Return the member with this rank."""
        return self.members[rank]


@dataclass(frozen=True)
class JobStatus:
    """The jobs that were found, and unreadable pages: process → reason."""

    jobs: tuple[ObservedJob, ...] = ()
    unreadable: Mapping[int, str] = field(default_factory=dict)


def survey(pid: int | None = None, elsewhere: RemoteStatus | None = None) -> JobStatus:
    """Return the jobs of this user, or only the job of process `pid`.

    `elsewhere`: a reader of other hosts' pages to reuse between surveys; by default, a new one is used once.

    Raises `InvalidArgument` if there is no such process, if it is another user's, or no rank of a job.
    """
    if pid is not None:
        _check(pid)
    if elsewhere is None:
        with closing(RemoteStatus()) as fetched:
            return survey(pid, fetched)
    pages, agents, unreadable = _pages()
    jobs: dict[str, ObservedJob] = {}
    numbers: dict[str, list[int]] = {}  # job → processes that show its pages
    for name, shown in _by_job(pages, unreadable).items():
        numbers[name] = list(shown)
        try:
            here = {int(page.about["rank"]): page for page in shown.values()}
            job = _job(here, _fetched(here, agents.get(name), elsewhere))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            unreadable.update(dict.fromkeys(shown, f"its picture makes no sense ({error!r})"))
            continue
        if any(member.seen is not None and member.state not in ("dead", "gone") for member in job.members):
            jobs[name] = job
    if pid is None:
        return JobStatus(tuple(sorted(jobs.values(), key=lambda job: job.seconds)), unreadable)
    if pid in unreadable:
        raise InvalidArgument(f"the status page of process {pid} cannot be read: {unreadable[pid]}")
    for name, job in jobs.items():
        if pid in numbers[name]:
            return JobStatus((job,))
    raise InvalidArgument(
        f"process {pid} is no rank of a running job of mcr_plus with several ranks; "
        "ranks are shown once mcr.init has returned"
    )


def _by_job(pages: Mapping[int, Shown], unreadable: dict[int, str]) -> dict[str, dict[int, Shown]]:
    """Return the pages of each job, by process; note pages without a job in `unreadable`."""
    found: dict[str, dict[int, Shown]] = {}
    for number, page in pages.items():
        name, rank = page.about.get("job"), page.about.get("rank")
        if isinstance(name, str) and isinstance(rank, int):
            found.setdefault(name, {})[number] = page
        else:
            unreadable[number] = "its description makes no sense"
    return found


def _fetched(here: Mapping[int, Shown], agent: str | None, elsewhere: RemoteStatus) -> dict[int, Shown]:
    """Return the pages of a job's ranks on other hosts. `agent`: the path of its agent's page."""
    about = next(iter(here.values())).about
    missing = {int(rank) for rank in about["elsewhere"]} - here.keys()
    return elsewhere.pages(agent, about, missing) if agent is not None and missing else {}


def _check(pid: int) -> None:
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        raise InvalidArgument(f"there is no process {pid} on this host: its job has ended") from None
    stat = read_stat(pid)
    if stat is None or stat[0] in "ZX":
        raise InvalidArgument(f"process {pid} has ended")
    if owner != os.geteuid():
        raise InvalidArgument(
            f"process {pid} belongs to {user_name(owner)}, and only that user can see its job: "
            f"run mcr-plus top as {user_name(owner)}"
        )


def user_name(number: int) -> str:
    """Return the name of a user."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _pages() -> tuple[dict[int, Shown], dict[str, str], dict[int, str]]:
    """Return the pages of this user's ranks, each once, by the process that shows it.

    Also returns the paths of agents' pages, by job, and the reasons for unreadable pages.
    """
    holders: dict[int, dict[int, str]] = {}  # inode of the page → process → path
    agents: dict[str, str] = {}
    for pid, path, name in _descriptors():
        with contextlib.suppress(OSError):
            status = os.stat(path)
            if status.st_uid == os.geteuid() and name == NAME:
                holders.setdefault(status.st_ino, {})[pid] = path
            elif status.st_uid == os.geteuid():
                with contextlib.suppress(Unreadable):
                    agents[str(read_at(path).about.get("job"))] = path
    pages: dict[int, Shown] = {}
    unreadable: dict[int, str] = {}
    for processes in holders.values():  # forked children of a rank hold its page too
        first = min(processes)
        try:
            page = read_at(processes[first])
            number = _owner(page, processes)
            pages[number] = page
        except Unreadable as error:
            unreadable[first] = str(error)
        except OSError:  # the process has ended meanwhile
            continue
    return pages, agents, unreadable


def _owner(page: Shown, holders: Mapping[int, str]) -> int:
    """Return the process that writes a page: the pid on it or, in a container, its first holder."""
    try:
        number = int(page.about["processes"][page.about["rank"]][0])
    except (KeyError, TypeError, ValueError, IndexError):
        return min(holders)
    return number if number in holders else min(holders)


def _descriptors() -> Iterator[tuple[int, str, str]]:
    """Yield the descriptors of this user's pages: process, path, and name of the memory."""
    own = os.geteuid()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        folder = f"/proc/{entry.name}/fd"
        try:
            if entry.stat().st_uid != own:
                continue
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            path = f"{folder}/{name}"
            with contextlib.suppress(OSError):
                target = os.readlink(path)
                if target.startswith(_MEMORY):
                    yield int(entry.name), path, NAME if target.startswith(_MEMORY[0]) else HOSTS


def _job(here: Mapping[int, Shown], fetched: Mapping[int, Shown]) -> ObservedJob:
    """Return a job, from its ranks' pages on this host and the fetched pages of other hosts."""
    any_page = next(iter(here.values()))
    pages = {**fetched, **here}
    about = any_page.about
    hosts = tuple(str(host) for host in about["hosts"])
    elsewhere = {int(rank) for page in here.values() for rank in page.about["elsewhere"]}
    processes = [(int(pid), str(started)) for pid, started in about["processes"]]
    now = time.monotonic()
    states: dict[int, State] = {}
    for rank, (pid, started) in enumerate(processes):
        if rank in here:
            process = state_of(pid, started)
            states[rank] = _state(here[rank], now) if process == "running" else process
        elif rank in elsewhere:
            seen = _state_elsewhere(rank, here)
            shown = rank in fetched and seen in ("running", "unknown")
            states[rank] = _state(fetched[rank], now) if shown else seen
        else:
            states[rank] = "dead" if state_of(pid, started) == "dead" else "gone"
    drawn = [
        _member(rank, hosts[rank], process[0], states, pages, now) for rank, process in enumerate(processes)
    ]
    members = tuple(
        replace(
            _corrected(member, drawn),
            tracer=tracer_of(member.pid) if member.state == "stopped" and member.rank in here else 0,
        )
        for member in drawn
    )
    seconds = time.time() - float(about["began"])
    return ObservedJob(str(about["job"]), any_page.version, hosts, seconds, members, tuple(sorted(here)))


def _corrected(member: Member, others: Sequence[Member]) -> Member:
    """Return a member with the numbers seen by ranks that wait for it: its own picture may be older."""
    known: dict[str, int] = {}
    for wait in (wait for other in others for wait in other.waits if member.rank in wait.issued):
        known[wait.group] = max(known.get(wait.group, 0), wait.issued[member.rank])
    groups = tuple(
        replace(group, issued=known[group.name], last="")
        if known.get(group.name, 0) > group.issued
        else group
        for group in member.groups
    )
    return replace(member, groups=groups)


def _state(page: Shown, now: float) -> State:
    """Return the state of a rank whose process runs."""
    picture = page.picture
    if not picture:
        return "unknown"
    if now - float(picture["at"]) > _STALE:
        return "busy"
    if picture["waits"]:
        return "waiting"
    return "inside" if picture["call"] else "outside"


def _state_elsewhere(rank: int, pages: Mapping[int, Shown]) -> State:
    """Return the state of a remote rank, as its host's agents report it in the latest picture here."""
    latest = max(
        (page.picture for page in pages.values() if page.picture), key=lambda each: each["at"], default={}
    )
    known = latest.get("elsewhere", {}).get(str(rank), "unknown")
    return _OF_AGENTS.get(known, "unknown")


def _member(
    rank: int,
    host: str,
    pid: int,
    states: Mapping[int, State],
    pages: Mapping[int, Shown],
    now: float,
) -> Member:
    page = pages.get(rank)
    if page is None or not page.picture:
        return Member(rank, host, pid, states[rank], seen=None if page is None else 0.0)
    picture = page.picture
    at = float(picture["at"])
    frames = tuple(Line(str(name), str(file), int(line)) for name, file, line in picture["frames"])
    return Member(
        rank,
        host,
        pid,
        states[rank],
        seen=max(0.0, now - at),
        idle=max(0.0, now - float(picture["active"])),
        waits=tuple(_waiting(each, rank, picture, states, pages, now) for each in picture["waits"]),
        call=str(picture["call"]),
        lines=tuple(frames[int(index)] for index in picture["program"]),
        frames=frames,
        groups=tuple(_traffic(group, now) for group in picture["groups"]),
        more_groups=int(picture["more_groups"]),
        error=str(picture["error"]),
        dumped={str(name): str(text) for name, text in picture.get("dumped", {}).items()},
    )


def _traffic(group: Mapping[str, Any], now: float) -> GroupTraffic:
    changed = float(group["changed"])
    return GroupTraffic(
        name=str(group["name"]),
        size=int(group["size"]),
        ranks=tuple(int(rank) for rank in group["ranks"]),
        issued=int(group["issued"]),
        last=str(group["last"]),
        idle=max(0.0, now - changed) if changed else None,
        operations_per_s=float(group.get("operations_per_s", 0.0)),
        bytes_per_s=float(group.get("bytes_per_s", 0.0)),
        in_flight=int(group["in_flight"]),
    )


def _waiting(
    wait: Mapping[str, Any],
    rank: int,
    picture: Mapping[str, Any],
    states: Mapping[int, State],
    pages: Mapping[int, Shown],
    now: float,
) -> RankWait:
    group, number = str(wait["group"]), int(wait["number"])
    issued: dict[int, int] = {}
    for peer, posted in wait["missing"]:
        if int(peer) not in states:
            raise ValueError(f"no rank {peer}")
        # Across hosts, a rank posts its number only now and then: prefer its own page if it is here.
        own = _issued(pages.get(int(peer)), group)
        issued[int(peer)] = int(posted) if own is None else max(own, int(posted))
    missing = [peer for peer, last in issued.items() if not number or last < number]
    count = int(wait["missing_count"]) - (len(issued) - len(missing))
    if not missing:
        members = next((each["ranks"] for each in picture["groups"] if each["name"] == group), ())
        missing = [int(peer) for peer in members if peer != rank and states[int(peer)] in LOST]
        count = len(missing)
    return RankWait(
        group=group,
        number=number,
        operation=str(wait["operation"]),
        library=str(wait["library"]),
        seconds=max(0.0, now - float(wait["since"])),
        waits_for=tuple(missing),
        issued={peer: issued[peer] for peer in missing if peer in issued and number},
        missing=count,
        started=bool(wait["started"]),
        timeout=float(wait["timeout"]),
    )


def _issued(page: Shown | None, group: str) -> int | None:
    """Return the number of the last operation of a group on a rank's own page."""
    groups: Sequence[Mapping[str, Any]] = page.picture.get("groups", ()) if page is not None else ()
    return next((int(each["issued"]) for each in groups if each["name"] == group), None)
