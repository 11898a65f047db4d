"""`mcr.sync` copies weights from one or more source ranks to other ranks, as lossless deltas."""

from __future__ import annotations

import logging
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

_log = logging.getLogger("mcr_plus")
_ATTACHED: Final = "weight_sync."
_LAST_WITHIN: Final = 10.0  # seconds for receivers outside the job to get the last version

Path = str | os.PathLike[str]


class WeightSync:
    """Weights that source ranks push and other ranks pull; made by `mcr.sync` and `mcr.join_sync`.

    Sources encode and send on threads of their own, and receivers receive on such threads. Only the program's
    thread calls `push` and `pull`.
    """

    def __init__(
        self,
        comm: Communicator | None,
        tag: str,
        end: WeightSource | WeightReceiver,
        timeout: float,
        withdraw: Callable[[], None] | None = None,
    ) -> None:
        """Wrap `end`. `comm`: None outside the job. `timeout`: for `pull`. `withdraw` removes the file."""
        self._comm, self._tag, self._end = comm, tag, end
        self._timeout, self._withdraw = timeout, withdraw
        self._closed = False

    def push(self, version: int | None = None) -> int | None:
        """On a source rank: publish the weights as they are now; returns their version. Elsewhere: None.

        Returns after one copy of the weights, once the previous version is encoded. A receiver gets the
        version that is the newest when it asks; payloads of skipped versions are sent as far as the receiver
        needs them. `version`: an integer above the last one, for example the training step; by default the
        next integer. The weights at the call of `mcr.sync` have number 0. With several source ranks, each
        pushes its own part under the same numbers; receivers get a version once all sources have pushed it.

        Raises:
            InvalidArgument: `version` is not above the last one, or names, shapes or dtypes have changed
                since `mcr.sync`; the text names them.
            PeerLost: all receivers are lost, and there is no invitation; the loss of only some is logged.
            NotInitialized: the synchronisation is closed.
        """
        self._check()
        return self._end.push(version) if isinstance(self._end, WeightSource) else None

    def pull(self, wait: bool = True, timeout: float | None = None) -> int | None:
        """On a receiver: copy the newest weights to the tensors, in place; returns their version.

        On a source: returns None. Waits for a newer version than that of the tensors, up to
        `timeout` seconds (None: the deadline of operations of the source's job). Without `wait`, returns None
        at once if none has arrived. Versions overtaken by a newer one are skipped. Versions are received,
        applied to a copy and compared with their digest in the background, so the program pauses for one copy
        of the weights, at most longer by the time to apply one message. Values that the program has written
        to the tensors are overwritten.

        Raises:
            CommTimeout: no newer version came in time; the text names source ranks that others wait for.
            InvalidArgument: names, shapes or dtypes have changed since `mcr.sync`; the text names them.
            SyncClosed: a source has closed it or its job has ended, and nothing newer came: the normal end.
            PeerLost: a source has died, and nothing newer has arrived from it.
            BackendError: a source has failed, or three answers in a row were damaged. The two errors above
                are of this type, too.
            NotInitialized: the synchronisation is closed.
        """
        self._check()
        if isinstance(self._end, WeightSource):
            return None
        seconds = self._timeout if timeout is None else timeout
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
            raise InvalidArgument(f"pull: timeout={timeout!r}; expected seconds, at least 0, or None")
        return self._end.pull(wait, seconds)

    def stats(self) -> dict[str, Any]:
        """Return figures of this rank. Bytes are bytes on the wire, seconds are wall time.

        On all ranks: `version` (of the tensors; on a source, of the last encoding),
        `versions_behind` (newer versions that are known to exist), `density` (share of the elements that the
        last message lists as changed), `bytes` (of the last message; with several sources, of the last
        message from each), `dense_bytes` (of the weights that this rank sends or receives), `seconds` (to
        encode, or to apply and compare, the last message), `anchors` (messages with all weights). On a
        source: `push_seconds` (the last copy), `sent_bytes`, `relayed` (messages that it left to relays),
        `history_bytes` (payloads kept for late receivers), `receivers` (connected), `joined` (connected
        receivers outside the job), `lost` (ranks). On receivers: `pause_seconds` (the last pull, without
        waiting), `received_bytes`, `forwarded_bytes` (to other receivers), `refused` (damaged).
        """
        return {**self._end.stats(), "dense_bytes": self._end.nbytes}

    def close(self) -> None:
        """End the synchronisation; collective over the group. `mcr.finalize` does it, too. May be repeated.

        The source waits for the receivers, so that they can pull the last version; for receivers outside the
        job up to 10 seconds, but not in `finalize`. A receiver outside the job waits for nobody. The
        invitation is removed, unless another synchronisation has replaced it.
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
                if self._withdraw is not None and not self._end.was_joined:
                    _log.warning("%r: closed before any server has joined by its invitation", self._tag)
        finally:
            self._end_here()

    def end_with_group(self, clean: bool) -> None:
        """End the synchronisation on this rank as its group is closed; `clean`: not because of an error."""
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


@torch.inference_mode(False)  # threads outside of inference mode write the buffers made here
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
    """Copy the weights of source ranks to the other ranks, again and again; collective over `group`.

    Each `push` of the source makes a version; a receiver's `pull` copies the newest one to its tensors. Only
    changes since the receiver's version travel, without loss (see the codec `delta`). All weights travel if
    they arrive earlier, if the receiver holds something else (for example after a restart), or if a message
    was damaged. Neither case affects other ranks, and the source's program is never interrupted: encoding and
    sending run on other threads. A receiver that starts with the source's weights, for example from the same
    checkpoint, gets only changes from the first version on.

    Ranks may hold parts of tensors: several source ranks (`src=range(4)`) shards of one layout, receivers
    shards of another, such as FSDP2's and tensor parallel ones. A receiver gets from each source rank
    only elements that it holds itself; elements that several receivers hold are encoded once, by one of
    the source ranks that hold them. A DTensor defines the shard of its rank; `layout` defines it for other
    tensors. A tensor with neither is whole. With shards, or several sources, ranks may lack tensors.

    Weights travel on a TCP connection from each source to each receiver, not through the pipeline
    (`docs/decisions/0029-weight-sync.md`, `0044-sharded-weight-sync.md`). Memory: a source keeps two copies
    of the weights that it sends, room for a payload, and payloads of earlier versions; a receiver keeps one
    copy of its weights, and the messages that arrive.

    Args:
        module_or_state_dict: a module (all parameters and buffers travel) or a mapping of tensors.
            Without layouts, all ranks have the same names, shapes and dtypes in the same order. Tensors
            that share memory travel once. Any strides and devices; sources read, receivers write in place.
        src: the rank in the job that has the weights, or several such ranks.
        tag: a name; a group may run several synchronisations at a time under different names.
        layout: layouts of the tensors of which this rank has a part, by name; each rank passes its own. Only
            the shard of this rank counts.
        group: the communicator of the participating ranks, None for all.
        history: payloads of earlier versions that a source keeps, as a multiple of the weights' bytes; with
            several sources at least 1 MiB. With 0 only the last is kept.
        invite: a file that the first rank of `src` writes, so that processes outside the job may receive
            the weights too, at any time (`mcr.join_sync`): all tensors, if the sources together hold them,
            the shards of a receiver in the job, or an entry of `offers`. The group then needs no
            receiver. The same on all ranks. The file has a key of this synchronisation and is readable by
            its owner alone; `close` removes it.
        offers: further shards for receivers outside the job, such as tensor parallel servers: names, each
            with the layouts of tensors by name. Their ranks, numbered freely, are those that receivers pass
            to `mcr.join_sync`. Tensors without a layout are whole on each rank. The same on all ranks.

    Raises:
        InvalidArgument: on all ranks if the tensors differ between ranks (the text names the first
            difference), a local tensor does not fit its layout, no source holds an element that a receiver
            has, or a rank cannot take part; a rank of `src` is not in the group; the tag is in use; the
            invitation cannot be written, or would offer nothing; `offers` do not fit, or differ by rank.

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
    # An error of this rank is sent to the others instead of raised, so that all ranks raise it.
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
    arguments = ((), "", "") if mine else (sources, tag, file)  # refused arguments may be of any type
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
        # All ranks compute the same parts from the same answers. The nonce makes the key unique to this call.
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
        # Load the kernels now: later it would delay a push or a pull.
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
            end.is_last = lambda: runtime.closed  # `finalize` waits for receivers, which may wait for it
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
    """Return, for each source of a receiver, its address and the numbers of the parts that it sends."""
    return {
        source: (place, [number for number, part in enumerate(parts) if part.source == source])
        for source, place in places.items()
    }


def _needed(parts: Sequence[ShardAssignment], receiver: int) -> list[int]:
    """Return the numbers of the parts that a receiver, or an offer, needs."""
    return [number for number, part in enumerate(parts) if receiver in part.receivers]


def _place(answer: _Answer) -> tuple[str, int]:
    assert answer.place is not None
    return answer.place


def _address(single_host: bool, invites: bool) -> str:
    """Return the address for a source to listen on: invited receivers may be on other hosts."""
    if single_host and not invites:
        return "127.0.0.1"
    try:
        return host_address()
    except LaunchError:
        if single_host:
            return "127.0.0.1"
        raise


def _listener(address: str) -> socket.socket:
    """Return a socket for receivers. Raises `InvalidArgument`: other ranks wait for this one's answer."""
    try:
        return listen(address)
    except OSError as error:
        raise InvalidArgument(f"sync: receivers cannot connect to {address}: {error}") from None


def _invited(
    comm: Communicator, lead: int, file: str, invitation: EndpointFile | None
) -> Callable[[], None] | None:
    """Write the lead's invitation; returns a function that removes it, on the lead. Raises on all ranks."""
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
    """Arguments and shards of a rank, for the other ranks.

    `place`: address of a source; `is_whole`: whether all tensors are whole; `offers`: digest of the offers.
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
    """Raise the same error on all ranks if a rank cannot take part, or their arguments differ."""
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
        return  # `parts_of` compares shards tensor by tensor
    expected = answers[source].held
    for rank, answer in answers.items():
        here, there = (f"rank {each}{of_job} has" for each in (source, rank))
        difference = first_difference(expected, answer.held, here, there)
        if difference is not None:
            raise InvalidArgument(f"sync: {difference}")
