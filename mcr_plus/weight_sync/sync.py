"""`mcr.sync`: the weights of one rank, or of several, on others, of which only what changed travels."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.units import whole_number, whole_numbers
from mcr_plus.errors import InvalidArgument, LaunchError, McrError, NotInitialized, is_normal_end
from mcr_plus.job.agreement import gather_patiently
from mcr_plus.job.init import current, member_of
from mcr_plus.kernels import delta
from mcr_plus.rendezvous.network import host_address
from mcr_plus.rendezvous.stream import key_of, listen
from mcr_plus.weight_sync import endpoint_file
from mcr_plus.weight_sync.endpoint_file import EndpointFile, Offers, offers_of
from mcr_plus.weight_sync.receiver import WeightReceiver
from mcr_plus.weight_sync.shards import HeldShard, ShardAssignment, parts_of
from mcr_plus.weight_sync.source import SMALL, WeightSource
from mcr_plus.weight_sync.weights import Layouts, Source, Weights, first_difference

_ATTACHED: Final = "weight_sync."
_LAST_WITHIN: Final = 10.0  # seconds in which receivers outside the job get the last version

Path = str | os.PathLike[str]


class WeightSync:
    """Weights that source ranks push and the others pull; made by `mcr.sync` and `mcr.join_sync`.

    A source encodes and sends on threads of its own, and the other ranks receive on such. `push` and
    `pull` belong to the program's thread.
    """

    def __init__(
        self,
        comm: Communicator | None,
        tag: str,
        end: WeightSource | WeightReceiver,
        timeout: float,
        withdraw: Callable[[], None] | None = None,
    ) -> None:
        """`comm`: None outside the job. `timeout`: of `pull`. `withdraw`: removes the invitation."""
        self._comm, self._tag, self._end = comm, tag, end
        self._timeout, self._withdraw = timeout, withdraw
        self._closed = False

    def push(self, version: int | None = None) -> int | None:
        """On a source rank: publish the weights as they are now; returns their version. Elsewhere: None.

        Returns after one copy of the weights, and after the version before is encoded if it is not yet.
        Receivers get the newest version that there is when they ask; those that are skipped are sent as far
        as they are needed. `version`: an integer above the last one, by default the next one; for example
        the training step. The first version that `mcr.sync` found has number 0. Where there are several
        source ranks, each pushes its own part, with the same numbers; receivers get a version once all have.

        Raises:
            InvalidArgument: `version` is not above the last one, or names, shapes or dtypes have changed
                since `mcr.sync`; the text names them.
            PeerLost: all receivers have gone, and there is no invitation; the loss of some is logged.
            NotInitialized: it is closed.
        """
        self._check()
        return self._end.push(version) if isinstance(self._end, WeightSource) else None

    def pull(self, wait: bool = True, timeout: float | None = None) -> int | None:
        """On a receiver: copy the newest weights to the tensors, in place; returns their version.

        On a source: returns None. Waits for a version newer than the one that the tensors have, up to
        `timeout` seconds (None: the deadline of operations of the source's job). Without `wait`, returns None
        at once if none has arrived. Versions that a newer one has overtaken are skipped. They are received,
        applied to a copy and compared with their digest beforehand, so that the program pauses for one copy
        of the weights; at most for the application of what one message brings before that. Values that the
        program has written to the tensors are overwritten.

        Raises:
            CommTimeout: nothing newer came in time; the text names source ranks that others wait for.
            InvalidArgument: names, shapes or dtypes have changed since `mcr.sync`; the text names them.
            SyncClosed: a source has closed it, or its job has ended, and nothing newer has arrived: the
                normal end.
            PeerLost: a source has died, and nothing newer has arrived from it.
            BackendError: a source has failed, or three answers in a row were damaged. The two errors above
                are of this type, too.
            NotInitialized: it is closed.
        """
        self._check()
        if isinstance(self._end, WeightSource):
            return None
        seconds = self._timeout if timeout is None else timeout
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
            raise InvalidArgument(f"pull: timeout={timeout!r}; expected seconds, at least 0, or None")
        return self._end.pull(wait, seconds)

    def stats(self) -> dict[str, Any]:
        """Figures of this rank. Bytes are those on the wire, seconds of wall time.

        On all ranks: `version` (of the tensors; on a source the last one that is encoded),
        `versions_behind` (newer ones that are known to exist), `density` (share of the elements that the
        last message lists as changed), `bytes` (of the last message; at a receiver of several sources, of the
        last one from each), `dense_bytes` (of the weights that this rank sends or receives), `seconds` (to
        encode, or to apply and compare, the last message), `anchors` (messages with all weights). On a
        source: `push_seconds` (the last copy), `sent_bytes`, `history_bytes` (payloads kept for receivers
        that are late), `receivers` (connected), `joined` (how many of these are outside the job), `lost`
        (ranks). On receivers: `pause_seconds` (the last
        pull, without waiting), `received_bytes`, `refused` (damaged messages).
        """
        return {**self._end.stats(), "dense_bytes": self._end.nbytes}

    def close(self) -> None:
        """End it; collective over the group. `mcr.finalize` does it, too. A second call does nothing.

        The source waits for the others, so that they can pull what has been pushed; up to 10 seconds for
        receivers outside the job, which `finalize` does not. Such a receiver itself waits for nobody. The
        invitation is removed, unless it is that of another synchronisation by now.
        """
        if self._closed:
            return
        try:
            if isinstance(self._end, WeightSource):
                self._end.is_last = lambda: True
            if self._comm is not None and not self._comm.closed:
                self._comm.barrier()
            if isinstance(self._end, WeightSource):
                self._end.settle(_LAST_WITHIN)
        finally:
            self._end_here()

    def end_with_group(self, clean: bool) -> None:
        """End it here: its group is closed, `clean` if that was not because of an error."""
        if not self._closed:
            self._end_here(in_order=clean)

    def _end_here(self, *, in_order: bool = True) -> None:
        self._closed = True
        if self._comm is not None:
            self._comm.attached.pop(f"{_ATTACHED}{self._tag}", None)
        if self._withdraw is not None:
            self._withdraw()
        self._end.close(in_order=in_order)

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *exception: object) -> None:
        if is_normal_end(exception[1]):
            self.close()
        else:
            self._end_here(in_order=False)

    def _check(self) -> None:
        if self._closed or (self._comm is not None and self._comm.closed):
            raise NotInitialized(f"{self._tag!r}: the weight sync is closed")


@torch.inference_mode(False)  # threads outside of this mode write the buffers that are made here
def sync(
    module_or_state_dict: Source,
    src: int | Sequence[int] = 0,
    tag: str = "policy",
    layout: Layouts | None = None,
    group: Communicator | None = None,
    *,
    history: float = 1.0,
    invite: Path | None = None,
    offers: Offers | None = None,
) -> WeightSync:
    """Bring the weights of source ranks to the other ranks, again and again; collective over `group`.

    Each `push` of the source is a version; a receiver's `pull` copies the newest one to its tensors. Only
    what changed since the version that a receiver holds travels, without loss (see the codec `delta`), and
    all weights where these are there sooner, where the receiver holds something else, such as after a
    restart, or if what it received is damaged. That concerns no other rank, and never the source's program:
    encoding and sending run on threads beside it. A receiver that has the source's weights at the beginning,
    for example from the same checkpoint, gets changes alone from the first version on.

    Ranks may hold parts of tensors: several source ranks (`src=range(4)`) those of one layout, receivers
    those of another, such as FSDP2's shards and tensor parallel ones. A receiver gets from each source rank
    the elements that it holds, and no others; those that several receivers hold are encoded once, by one of
    the source ranks that hold them. A DTensor says itself what its rank holds; `layout` says it of other
    tensors. A tensor with neither is whole. With parts, or several sources, ranks may lack tensors.

    Weights travel on a TCP connection from each source to each receiver, not through the pipeline
    (`docs/decisions/0029-weight-sync.md`, `0044-sharded-weight-sync.md`). Memory: a source keeps two copies
    of the weights that it sends, room for a payload, and payloads of earlier versions; a receiver keeps one
    copy of its weights, and the messages that arrive.

    Args:
        module_or_state_dict: a module, of which all parameters and buffers travel, or a mapping of tensors;
            without layouts, on all ranks with the same names, shapes and dtypes in the same order. Tensors
            that share memory travel once. Any strides and devices; on a source it is read, elsewhere written
            in place.
        src: the rank in the job whose weights these are, or the ranks.
        tag: a name; a group may have several at a time under different names.
        layout: for the names of tensors of which this rank has a part, their layouts; each rank passes its
            own. Of a layout, only what it says of this rank counts.
        group: the communicator of the ranks that take part, None for all.
        history: payloads of earlier versions that a source keeps, as a multiple of the weights' bytes; of
            several sources 1 MiB at least, but with 0 none but the last.
        invite: a file that the first rank of `src` writes, by which processes outside the job may receive
            the weights as well, at any time (`mcr.join_sync`): all of all tensors, if the sources hold that
            together, what a receiver in the job holds, or what is in `offers`. The group then needs no
            receiver. The same on all ranks. The file has a key of this synchronisation and is readable by
            its owner alone; `close` removes it.
        offers: what receivers outside the job may hold as well, such as tensor parallel servers: names, each
            for the layouts of tensors by name, whose ranks are those that receivers pass to `mcr.join_sync`,
            numbered as they like. Tensors without a layout are whole on each of them. The same on all ranks.

    Raises:
        InvalidArgument: on all ranks if the tensors differ between ranks (the text names the first
            difference), a local tensor does not fit its layout, no source holds an element that a receiver
            has, or a rank cannot take part; a rank of `src` is not in the group; the tag is in use; the
            invitation cannot be written, or would offer nothing; `offers` are not of the sources' tensors, or
            are not the same on all ranks.

    Example:
        ```python
        with mcr.init() as comm:
            model = torch.nn.Linear(64, 64).bfloat16()
            weights = mcr.sync(model, src=0)
            with torch.no_grad():
                model.weight += comm.rank == 0
            weights.push()  # on rank 0; nothing elsewhere
            weights.pull()  # elsewhere; nothing on rank 0
            print(comm.rank, weights.stats()["version"], weights.stats()["bytes"])
        ```
    """
    comm = member_of(group)
    rank = comm.ranks[comm.rank]
    world = current().world
    weights, listener, mine = None, None, ""
    sources: tuple[int, ...] = ()
    named: Offers = {}
    try:
        sources = _sources(src, comm)
        _check(comm, tag, history, invite)
        named = _named(offers, invite)
        weights = Weights(module_or_state_dict, layout, rank)
        if rank in sources:
            listener = _listener(_address(world.single_host, invite is not None))
    except McrError as error:
        mine = str(error)
    place = listener.getsockname()[:2] if listener is not None else None
    file = os.fspath(invite) if invite is not None and not mine else ""
    arguments = ((), "", "") if mine else (sources, tag, file)  # what is refused may be anything
    is_whole, offered = weights is None or weights.is_whole, endpoint_file.digest_of(named)
    own = _Answer(mine, place, arguments, is_whole, [], secrets.token_hex(32), offered)
    if weights is not None:
        own = own._replace(held=weights.held)
    withdraw: Callable[[], None] | None = None
    try:
        gathered = gather_patiently(comm, "sync", tuple(own))
        answers = dict(zip(comm.ranks, (_Answer(*each) for each in gathered), strict=True))
        of_job = comm.opened.group.of_job
        _compare(answers, mine, of_job)
        held = {each: answer.held for each, answer in answers.items()}
        found = offers_of(held, sources, named) if file else []
        parts = parts_of({**held, **{each.rank: each.held for each in found}}, sources, of_job)
        places = {each: _place(answers[each]) for each in sources}
        lead = next(iter(places))
        key = key_of(world.secret, answers[lead].nonce)
        if file:
            invitation = None
            if rank == lead:
                invitation = EndpointFile.of(tag, time.time(), key, world.timeout, places, found, parts)
            withdraw = _invited(comm, lead, file, invitation)
        assert weights is not None
        weights.lay([part for part in parts if rank == part.source or rank in part.receivers])
        for width in sorted({dtype.itemsize for dtype in weights.dtypes}):
            delta.prepare(width)
        what = f"sync {tag!r} of group '{comm.name}'"

        def ends() -> bool:
            return comm.closed

        end: WeightSource | WeightReceiver
        if rank in sources:
            own_parts = [part for part in parts if part.source == rank]
            buffers = {each: _needed(own_parts, each) for each in comm.ranks if each not in sources}
            of_offers = [_needed(own_parts, each.rank) for each in found]
            least = SMALL if history and len(sources) > 1 else 0
            kept = max(int(history * weights.nbytes), least)
            end = WeightSource(weights, what, key, listener, buffers, kept, ends, of_offers)
            runtime = current()
            end.is_last = lambda: runtime.closed  # it waits in `finalize`, where receivers may wait for it
        else:
            there = buffers_from([part for part in parts if rank in part.receivers], places)
            end = WeightReceiver(weights, what, key, there, rank, ends)
    except BaseException:
        if listener is not None:
            listener.close()
        if withdraw is not None:
            withdraw()
        raise
    made = WeightSync(comm, tag, end, world.timeout, withdraw)
    comm.attached[f"{_ATTACHED}{tag}"] = made
    return made


def buffers_from(
    parts: Sequence[ShardAssignment], places: Mapping[int, tuple[str, int]]
) -> dict[int, tuple[tuple[str, int], list[int]]]:
    """Where each source listens, and the numbers of the parts that a receiver gets from it."""
    return {
        source: (place, [number for number, part in enumerate(parts) if part.source == source])
        for source, place in places.items()
    }


def _needed(parts: Sequence[ShardAssignment], receiver: int) -> list[int]:
    """The numbers of the parts that a receiver, or an offer, needs."""
    return [number for number, part in enumerate(parts) if receiver in part.receivers]


def _place(answer: _Answer) -> tuple[str, int]:
    assert answer.place is not None
    return answer.place


def _address(single_host: bool, invites: bool) -> str:
    """Where a source listens: receivers that are invited may be on other hosts, if there are any."""
    if single_host and not invites:
        return "127.0.0.1"
    try:
        return host_address()
    except LaunchError:
        if single_host:
            return "127.0.0.1"
        raise


def _listener(address: str) -> socket.socket:
    """What receivers connect to. Raises `InvalidArgument`, as the other ranks wait for this one's answer."""
    try:
        return listen(address)
    except OSError as error:
        raise InvalidArgument(f"sync: receivers cannot connect to {address}: {error}") from None


def _invited(
    comm: Communicator, lead: int, file: str, invitation: EndpointFile | None
) -> Callable[[], None] | None:
    """Write the lead's invitation; returns there what removes it. Raises on all ranks if it fails."""
    problem, withdraw = "", None
    if invitation is not None:
        try:
            withdraw = endpoint_file.write(file, invitation)
        except InvalidArgument as error:
            problem = str(error)
    problem = comm.broadcast_object(problem, lead)
    if problem:
        raise InvalidArgument(f"rank {lead}{comm.opened.group.of_job}: {problem}")
    return withdraw


def _check(comm: Communicator, tag: str, history: float, invite: object) -> None:
    if not isinstance(tag, str) or not tag:
        raise InvalidArgument(f"sync: tag={tag!r}; expected a name")
    if f"{_ATTACHED}{tag}" in comm.attached:
        raise InvalidArgument(f"sync: tag {tag!r} is in use in group '{comm.name}'; close that one first")
    if isinstance(history, bool) or not isinstance(history, (int, float)) or not 0 <= history < 1e6:
        raise InvalidArgument(f"sync: history={history!r}; expected a multiple of the weights' bytes")
    if invite is not None and not (isinstance(invite, (str, os.PathLike)) and os.fspath(invite)):
        raise InvalidArgument(f"sync: invite={invite!r}; expected the name of a file, or None")


def _named(offers: object, invite: object) -> Offers:
    named = endpoint_file.checked(offers)
    if named and invite is None:
        raise InvalidArgument("sync: offers are for receivers outside the job, which need invite=")
    return named


class _Answer(NamedTuple):
    """What a rank says to others.

    `place`: where a source listens; `is_whole`: whether it has no parts; `offers`: their digest.
    """

    mistake: str
    place: tuple[str, int] | None
    arguments: tuple[tuple[int, ...], str, str]
    is_whole: bool
    held: list[HeldShard]
    nonce: str
    offers: str


def _sources(src: int | Sequence[int], comm: Communicator) -> tuple[int, ...]:
    one = whole_number(src)
    ranks = whole_numbers(src) if one is None else [one]
    if not ranks or len(set(ranks) & set(comm.ranks)) < len(ranks):
        raise InvalidArgument(
            f"sync: src={src!r}; expected one of the group's ranks{comm.opened.group.of_job} "
            f"{list(comm.ranks)}, or several of them, each once"
        )
    return tuple(ranks)


def _compare(answers: Mapping[int, _Answer], mine: str, of_job: str) -> None:
    """Raise the same on all ranks if one cannot take part, or they differ."""
    for rank, answer in answers.items():
        if answer.mistake:
            raise InvalidArgument(mine or f"rank {rank}{of_job}: {answer.mistake}")
    one, first = next(iter(answers.items()))
    for rank, answer in answers.items():
        if answer.arguments != first.arguments:
            raise InvalidArgument(
                f"sync: rank {one}{of_job} has src, tag and invite {first.arguments}, rank {rank}{of_job} "
                f"has {answer.arguments}"
            )
        if answer.offers != first.offers:
            raise InvalidArgument(f"sync: rank {one}{of_job} and rank {rank}{of_job} have different offers")
    source, *others = first.arguments[0]
    if others or not all(answer.is_whole for answer in answers.values()):
        return  # `parts_of` compares tensor by tensor
    expected = answers[source].held
    for rank, answer in answers.items():
        here, there = (f"rank {each}{of_job} has" for each in (source, rank))
        difference = first_difference(expected, answer.held, here, there)
        if difference is not None:
            raise InvalidArgument(f"sync: {difference}")
