"""Interface between dispatch and communication libraries: `Backend`, `Channel` and their types."""

# ruff: noqa: B027 (empty methods are defaults)

from __future__ import annotations

import math
import warnings
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable, Sized
from dataclasses import dataclass
from inspect import getattr_static
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol, cast

from mcr_plus.core.group import Group
from mcr_plus.core.kinds import Kind
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.streams import Streams
from mcr_plus.core.units import Range
from mcr_plus.rendezvous.world import World

Poll = Callable[[], bool]
"""Returns whether a started operation is done; drives its library's progress; raises its error."""


class ReceivePoll:
    """Poll of a receive that finds its message before the data has arrived.

    Other receives fail if the peer that they name leaves before they are done.

    Attributes:
        source: group rank of the sender, set when the message is found; None before.
        arriving: the message is being received, so its sender may leave.
    """

    source: int | None = None
    arriving: bool = False

    def __call__(self) -> bool:
        """See `Poll`."""
        raise NotImplementedError


class BlockingPoll(ABC):
    """Poll of an operation that the library's own threads complete; callers can block on it."""

    __slots__ = ()

    @abstractmethod
    def __call__(self) -> bool:
        """See `Poll`."""

    @abstractmethod
    def block(self, seconds: float) -> None:
        """Block until the operation is done, for at most about `seconds`, without the GIL.

        Callable from any thread. Raises nothing: the next poll raises the operation's error.
        """


class StreamPoll(Protocol):
    """Poll of an operation on a CUDA stream.

    `ready` is true once the operation is enqueued on its stream; until then the library needs the host. After
    that, the other two methods may be called, and never block.
    """

    @property
    def ready(self) -> bool:
        """Return whether the operation is enqueued on the stream."""
        ...

    def __call__(self) -> bool:
        """See `Poll`."""
        ...

    def order_current_stream(self) -> None:
        """Make the current stream wait for the operation."""
        ...

    def chain(self, function: Callable[[], None]) -> None:
        """Run `function` on the operation's stream; the operation then includes the function's kernels."""
        ...


Start = Callable[[Message], Poll]
"""Hand an operation to a library; returns at once."""
Corrupted = Callable[[int, int], Exception]
"""Return the error of a received message, given the sender's group rank and the first changed block."""


class FirstCalls:
    """A `Start` that another `Start` replaces after the first calls.

    Attributes:
        on_settled: called with the start for all later calls, as soon as it is known.
    """

    __slots__ = ("_start", "on_settled")

    def __init__(self, first: Start) -> None:
        self._start = first
        self.on_settled: Callable[[Start], None] | None = None

    def __call__(self, message: Message) -> Poll:
        """See `Start`."""
        return self._start(message)

    def settle(self, start: Start) -> None:
        """Use `start` for all later calls."""
        self._start = start
        if self.on_settled is not None:
            self.on_settled(start)


class NativeStart(NamedTuple):
    """Start of an operation in compiled code; the attribute `native` of a `Start` makes it.

    For a message, `native` takes peer and tag, and returns None if compiled code cannot start it.

    Attributes:
        begin: address of a C function: address of `words`, source and target → 1 if the operation is done.
        advance: the same of a C function: address of `words`, 1 → 1 if the operation is done.
        words: the operation's state, int64.
        running: operations in progress; `begin` may run while it is empty, by a thread that holds the GIL.
            None for messages.
        begun: takes an operation over for which `begin` has returned 0: source, target, tensors to keep. For
            messages the engine's lock is held since before `begin`.
        active: address of a number of messages in progress, which must be 0 too; 0 if there is none.
    """

    begin: int
    advance: int
    words: Any
    running: Sized | None
    begun: Callable[[int, int, Any], Poll]
    active: int = 0


class Persistent(Protocol):
    """A library's persistent request: start and poll. The first start may replace both."""

    begin: Callable[[], object]
    test: Poll


class Gate(Protocol):
    """A collective step that a library requires before it starts an operation.

    Called when all ranks have issued the operation, in the order of the group. Returns a poll that is true
    once the operation may start, or None if it may start at once. The poll raises `OperationsDiffer` if ranks
    have issued different operations. `every`: each operation of the signature must pass the gate. `again`:
    the next operation must pass the gate, and ranks compare it. Both may change while an operation passes.
    """

    @property
    def every(self) -> bool:
        """True if each operation of the signature must pass."""
        ...

    @property
    def again(self) -> bool:
        """True if the next operation must pass, and ranks compare it."""
        ...

    def __call__(self, message: Message) -> Poll | None:
        """Begin the step for `message`."""
        ...


@dataclass(frozen=True)
class Support:
    """Support of a backend for an operation.

    `native`: one call of the library. `emulated`: composed of other calls, which `how` lists. `no`:
    unsupported; `how` gives the reason and the supported alternatives.
    """

    level: Literal["native", "emulated", "no"]
    how: str = ""

    def __bool__(self) -> bool:
        return self.level != "no"


NATIVE = Support("native")


@dataclass(frozen=True)
class Availability:
    """Availability of a backend in this process; if unavailable, the reason and a remedy."""

    available: bool
    version: str = ""
    reason: str = ""
    remedy: str = ""


class Preference(NamedTuple):
    """Preference of a backend if neither a configuration nor a table decides.

    The lowest value is preferred. Backends with equal values, such as the default, keep the order of the
    registry.

    Attributes:
        cpu: for operations on CPU tensors. between_hosts: for large ones in groups on several hosts.
        cuda: for operations on CUDA tensors.
    """

    cpu: float = math.inf
    between_hosts: float = math.inf
    cuda: float = math.inf


class Channel(ABC):
    """One group of ranks in one library. Operations start in the same order on all ranks.

    Attributes:
        closes_alone: the channel has a `release`, which closes this rank's part while other ranks use theirs.
        outlives_library: the channel has a `give_up`; it may stay open when its library is closed, and be
            closed later.
        ballots: vote on a number before an operation, among ranks of one host, see `SharedBoard.cast`. Set
            before the first `bind`, for one channel with `takes_ballots` in a group; otherwise None.
        takes_ballots: the channel uses `ballots`.
        votes: True if ranks vote that they have started the same operation. Needed if an operation may
            complete on one rank before others have started it. A caller that compares operations itself
            clears `votes` before the first `bind`.
        streams: streams of the device, if operations run on a stream; None for the current CUDA device.
    """

    closes_alone: bool = False
    outlives_library: bool = False
    takes_ballots: bool = False
    votes: bool = True
    ballots: Callable[[int], Poll] | None = None
    streams: Streams | None = None

    def __init_subclass__(cls) -> None:
        """Set `closes_alone` and `outlives_library` from the methods that the class defines."""
        cls.closes_alone = cls.release is not Channel.release
        cls.outlives_library = cls.give_up is not Channel.give_up

    @abstractmethod
    def bind(self, signature: Signature) -> Start:
        """Bind `signature`; raises `Unsupported` if `supports` refuses it."""

    @abstractmethod
    def close(self) -> None:
        """Release the library's group: once, in the same order on all ranks, with nothing in flight."""

    def release(self) -> None:
        """Close this rank's part, see `closes_alone`; has no effect while an operation is in flight."""

    def give_up(self) -> None:
        """Free reserved resources, since the channel may never be closed."""

    def silent_failure(self) -> str:
        """Return the reason why operations in flight cannot end although the library reports no error, or ''.

        With failover, called every 0.1 s while operations are in flight or wait to start.
        """
        return ""

    def withdraw(self) -> None:
        """Let peers take no more data out of tensors of this rank, as an operation has failed."""

    def stop_operations(self) -> bool:
        """Stop operations in flight; return True once the library no longer reads or writes any tensor.

        Called repeatedly until it returns True. From the first call on, no rank starts or polls an operation.
        The default suits libraries that act only when called, see `stops_as_whole`.
        """
        return True

    def gate(self, signature: Signature, digest: int) -> Gate | None:  # noqa: ARG002
        """Return the collective step before operations of a signature; None if there is none."""
        return None

    def bind_persistent(self, signature: Signature, message: Message, digest: int) -> Persistent | None:  # noqa: ARG002
        """Return a persistent request on the tensors of a message; None if the library has none."""
        return None

    def bind_checked(self, signature: Signature, every: int, corrupted: Corrupted) -> Start | None:  # noqa: ARG002
        """Bind like `bind`, for messages with checksums; None if the library cannot send checksums.

        Receives raise the error that `corrupted` returns. Of the messages between two ranks with the same
        tag, one in `every` carries checksums; receives also accept messages without checksums.
        """
        return None


class Backend(ABC):
    """One communication library in one job, constructed with the `World` on all ranks.

    Attributes:
        name: name in configurations.
        on_stream: operations run on a CUDA stream and polls are event queries.
        spins: number of polls at full speed before a waiting rank yields.
        host_driven: operations advance only while they are polled, so a waiting rank continues to poll
            instead of sleeping.
        adds_in_order: whether it has reductions with `Signature.sums`; others are composed (`OrderedSum`).
        rings: the backend itself rings the bells of `World` when a poll has made progress for which a peer
            may wait.
        keeps_apart: the library never matches operations of different signatures, in whatever order ranks
            issue them. If False, ranks compare every operation before it starts, not only the first of a
            signature (on a stream, only the first).
        shares_connections: messages of all groups between two ranks share connections, which send messages in
            the order of posting.
        stops_as_whole: any call of the library may advance operations of all groups, and operations cannot be
            aborted. So after a failure this process does not call the library again.
        has_algorithms: True if configurations may name algorithms of the backend.
        preference: rank among the backends, see `Preference`.
    """

    name: str
    on_stream: bool
    spins: int
    host_driven: ClassVar[bool] = False
    rings: ClassVar[bool] = False
    adds_in_order: ClassVar[bool] = False
    keeps_apart: ClassVar[bool] = False
    shares_connections: ClassVar[bool] = False
    stops_as_whole: ClassVar[bool] = False
    has_algorithms: ClassVar[bool] = True
    preference: ClassVar[Preference] = Preference()

    def __init__(self, world: World) -> None:
        """Initialise the library; collective over the job's ranks if the library's initialisation is."""

    @classmethod
    def keeps_those_apart(cls, signature: Signature, hosts: int) -> bool:  # noqa: ARG003
        """Return `keeps_apart` for operations of one signature, in a group on `hosts` hosts."""
        return cls.keeps_apart

    # -- class methods: usable before the library is initialised -----------------------------------------

    @classmethod
    @abstractmethod
    def availability(cls) -> Availability:
        """Return whether the library is installed; does not initialise it."""

    @classmethod
    @abstractmethod
    def supports(cls, signature: Signature) -> Support:
        """Return the support for a signature; depends only on the signature, so it is equal on all ranks.

        `signature.algorithm` is None or an algorithm of the backend. For an unknown name, return a "no" that
        lists the known algorithms.
        """

    @classmethod
    def unavailable_in(cls, world: World) -> str:  # noqa: ARG003
        """Return the reason why the backend cannot be used in this job, or ''."""
        return ""

    @classmethod
    def unavailable_for(cls, world: World, group: Group) -> str:  # noqa: ARG003
        """Return the reason why a group of the job cannot use the backend, or ''; the same on all ranks."""
        return ""

    @classmethod
    def library_version(cls) -> str:
        """Return the name and version of the library, such as `Open MPI 5.0.11`, or ''."""
        return ""

    @classmethod
    def algorithms(cls, kind: Kind, ranks: int) -> list[str]:  # noqa: ARG003
        """Return the algorithms of a kind that `tune` should compare."""
        return []

    @classmethod
    def sizes(cls, algorithm: str) -> Range:  # noqa: ARG003
        """Return the message sizes in bytes for which a table's rule may name an algorithm."""
        return Range(0)

    @classmethod
    def unknown_algorithm(cls, name: str) -> str:  # noqa: ARG003
        """Return an error text if no operation has an algorithm of this name, or ''."""
        return ""

    @classmethod
    def descriptors(cls, size: int) -> int:  # noqa: ARG003
        """Return the number of file descriptors that a group of `size` ranks uses in each process."""
        return 0

    # -- in a job -------------------------------------------------------------------------------------

    @abstractmethod
    def open(self, group: Group) -> Channel:
        """Create the library's group; collective over the group's ranks."""

    @abstractmethod
    def progress(self) -> None:
        """Let the library advance all operations in flight."""

    def disconnect(self) -> None:
        """End the connections before an unclean `close`; no rank uses this world any more."""

    @abstractmethod
    def close(self, clean: bool) -> None:
        """Close the library. If `clean` is False, operations may be stuck, and the call must not block."""

    def thread_restriction(self) -> str:
        """Return the reason why the library cannot be called from two threads at once, or ''."""
        return ""

    @classmethod
    def breaks(cls, error: BaseException) -> str:  # noqa: ARG003
        """Return the reason why the library is unusable in this process after `error`, or ''."""
        return ""

    # -- at the end of a process ----------------------------------------------------------------------

    def before_exit(self) -> None:
        """Prepare for the end of the process; called in every process that has used the library."""

    def finalize(self) -> None:
        """Finalize the library; called after `before_exit` if all ranks end their processes."""

    @classmethod
    def switched_off(cls, reason: str) -> None:
        """Note that the library must not be called any more in this process."""

    def leave_launcher(self) -> None:
        """Sign off from the launcher; called instead of `finalize` if the library must not be called."""

    def abandon(self) -> None:
        """Drop the library in a forked child, which does not have the library's threads."""


def complete(kind: type[Any]) -> type[Backend]:
    """Return a backend class with missing members taken from `Backend`."""
    former = [old for old in _FORMER if hasattr(kind, old)]
    if issubclass(kind, Backend) and not former:
        return kind
    if kind not in _completed:
        place = f"{kind.__module__}.{kind.__name__}"
        for old in former:
            warnings.warn(f"{place}.{old} is now {_FORMER[old]}", DeprecationWarning, stacklevel=3)
        renamed = {_FORMER[old]: getattr_static(kind, old) for old in former}
        bases = (kind,) if issubclass(kind, Backend) else (kind, Backend)
        _completed[kind] = ABCMeta(kind.__name__, bases, {"__module__": kind.__module__, **renamed})
    return cast("type[Backend]", _completed[kind])


_completed: dict[type[Any], type[Any]] = {}

# Former names of members of `Backend`, which backends of other packages may still use.
_FORMER: Final = {
    "serves": "unavailable_in",
    "reaches": "unavailable_for",
    "refuses_threads": "thread_restriction",
    "needs_polls": "host_driven",
}


def complete_channel(channel: Any) -> Channel:
    """Return a channel with missing members taken from `Channel`."""
    return channel if isinstance(channel, Channel) else _CompletedChannel(channel)


_OPTIONAL: Final = (
    "release", "give_up", "gate", "bind_persistent", "silent_failure", "stop_operations", "streams",
    "withdraw",
)  # fmt: skip


class _CompletedChannel(Channel):
    """Adapter of a channel whose class does not derive from `Channel`."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self.closes_alone = hasattr(channel, "release")
        self.outlives_library = hasattr(channel, "give_up")
        for name in _OPTIONAL:
            if hasattr(channel, name):
                setattr(self, name, getattr(channel, name))

    def bind(self, signature: Signature) -> Start:
        return cast("Start", self._channel.bind(signature))

    def close(self) -> None:
        self._channel.close()


def done() -> bool:
    """Poll of a finished operation."""
    return True


def advice(same_dtype: bool, count: int) -> str:
    """Return advice for a receive with a larger buffer than the message, which MPI would fill in part."""
    if not same_dtype:
        return ""
    return f"; a message must fill its receive: send the size first, or receive into a tensor of {count}"
