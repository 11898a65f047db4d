"""The interface between dispatch and communication libraries: `Backend`, `Channel` and their types."""

# ruff: noqa: B027 (empty methods are defaults)

from __future__ import annotations

import math
import warnings
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable
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
    """The poll of a receive that finds its message before the data has arrived.

    With another poll, the sender is the peer that the receive names, and the receive fails if that rank
    leaves before it is done.

    Attributes:
        source: the group rank of the sender, set when the message is found; None before.
        arriving: the message is being received, so its sender may leave.
    """

    source: int | None = None
    arriving: bool = False

    def __call__(self) -> bool:
        """See `Poll`."""
        raise NotImplementedError


class BlockingPoll(ABC):
    """The poll of an operation that its library completes in threads of its own, and can be waited for."""

    __slots__ = ()

    @abstractmethod
    def __call__(self) -> bool:
        """See `Poll`."""

    @abstractmethod
    def block(self, seconds: float) -> None:
        """Wait until the operation is done, for at most about `seconds`, by any thread, without the
        interpreter. Raises nothing: the next poll raises the operation's error.
        """


class StreamPoll(Protocol):
    """The poll of an operation on a CUDA stream.

    `ready` is true once the operation is enqueued on its stream; before, its library still needs the host.
    The other two methods may be called once it is ready, and never block.
    """

    @property
    def ready(self) -> bool:
        """Whether the stream has the operation."""
        ...

    def __call__(self) -> bool:
        """See `Poll`."""
        ...

    def order_current_stream(self) -> None:
        """Make the current stream wait for the operation."""
        ...

    def chain(self, function: Callable[[], None]) -> None:
        """Run `function` under the operation's stream; the operation then includes its kernels."""
        ...


Start = Callable[[Message], Poll]
"""Hand an operation to a library; returns at once."""
Corrupted = Callable[[int, int], Exception]
"""Make the error of a received message: group rank of its sender, first block that has changed."""


class FirstCalls:
    """A `Start` that becomes another one after its first calls, which then need not go through it.

    Attributes:
        on_settled: called with the start for all later calls, once that is known.
    """

    __slots__ = ("_start", "on_settled")

    def __init__(self, first: Start) -> None:
        self._start = first
        self.on_settled: Callable[[Start], None] | None = None

    def __call__(self, message: Message) -> Poll:
        """See `Start`."""
        return self._start(message)

    def settle(self, start: Start) -> None:
        """Use `start` from now on."""
        self._start = start
        if self.on_settled is not None:
            self.on_settled(start)


class Persistent(Protocol):
    """A library's persistent request: its start and its poll. The first start may replace both."""

    begin: Callable[[], object]
    test: Poll


class Gate(Protocol):
    """A collective step of a library before it starts an operation.

    Called when all ranks have issued the operation, in the order of their group; returns a poll that is true
    once the operation may start, or None if it may start at once. The poll raises `OperationsDiffer` if ranks
    have issued different operations. `every`: each operation of the signature has to pass; `again`: the next
    one has to pass, and ranks compare it. Both may change while an operation passes.
    """

    @property
    def every(self) -> bool:
        """See the class."""
        ...

    @property
    def again(self) -> bool:
        """See the class."""
        ...

    def __call__(self, message: Message) -> Poll | None:
        """Begin."""
        ...


@dataclass(frozen=True)
class Support:
    """Support of a backend for an operation.

    `native`: one call of the library. `emulated`: composed of other calls, which `how` names. `no`:
    unsupported; `how` names the reason and the supported alternatives.
    """

    level: Literal["native", "emulated", "no"]
    how: str = ""

    def __bool__(self) -> bool:
        return self.level != "no"


NATIVE = Support("native")


@dataclass(frozen=True)
class Availability:
    """Whether a backend can run here; if not, the reason and a remedy."""

    available: bool
    version: str = ""
    reason: str = ""
    remedy: str = ""


class Preference(NamedTuple):
    """The places of a backend among others where neither a configuration nor a table decides.

    The lowest place comes first. Equal ones, such as the default, are in the order of the registry.

    Attributes:
        cpu: for operations on CPU tensors. between_hosts: for large ones of these in groups on several hosts.
        cuda: for operations on CUDA tensors.
    """

    cpu: float = math.inf
    between_hosts: float = math.inf
    cuda: float = math.inf


class Channel(ABC):
    """One group of ranks inside one library. Its operations start in the same order on all ranks.

    Attributes:
        closes_alone: it has a `release`, which closes this rank's part while other ranks use theirs.
        outlives_library: it has a `give_up`: it may stay open when its library is closed, and be closed
            later.
        ballots: a vote of the ranks of one host on a number before an operation, see `SharedBoard.cast`. Set
            before the first `bind` for one channel of a group that has `takes_ballots`; else None.
        takes_ballots: the channel uses `ballots`.
        votes: whether ranks vote that they have started the same operation, in a library in which it may
            complete on one rank before others have started it. Cleared before the first `bind` by a caller
            that compares operations itself.
        streams: of the device, if operations run on a stream; None for the current CUDA device.
    """

    closes_alone: bool = False
    outlives_library: bool = False
    takes_ballots: bool = False
    votes: bool = True
    ballots: Callable[[int], Poll] | None = None
    streams: Streams | None = None

    def __init_subclass__(cls) -> None:
        """Set `closes_alone` and `outlives_library` by the methods of the class."""
        cls.closes_alone = cls.release is not Channel.release
        cls.outlives_library = cls.give_up is not Channel.give_up

    @abstractmethod
    def bind(self, signature: Signature) -> Start:
        """Resolve everything about `signature`; raises `Unsupported` if `supports` denies it."""

    @abstractmethod
    def close(self) -> None:
        """Release the library's group: once, in the same order on all ranks, with nothing in flight."""

    def release(self) -> None:
        """Close this rank's part, see `closes_alone`; nothing happens while something is in flight."""

    def give_up(self) -> None:
        """Free reserved resources: the channel may never be closed."""

    def silent_failure(self) -> str:
        """Return the reason why operations in flight cannot end although the library reports no error, or ''.

        Called every tenth of a second while operations are in flight or wait for their start, if there is
        failover.
        """
        return ""

    def stop_operations(self) -> bool:
        """End what is in flight: return True once the library reads and writes no tensor any more.

        Called repeatedly until it returns True; no operation is started or polled from the first call on, on
        any rank. The default is for libraries that do nothing unless they are called, see `stops_as_whole`.
        """
        return True

    def gate(self, signature: Signature, digest: int) -> Gate | None:  # noqa: ARG002
        """Return the collective step before operations of a signature; None without one."""
        return None

    def bind_persistent(self, signature: Signature, message: Message, digest: int) -> Persistent | None:  # noqa: ARG002
        """Return a persistent request on the tensors of a message; None if the library has none for it."""
        return None

    def bind_checked(self, signature: Signature, every: int, corrupted: Corrupted) -> Start | None:  # noqa: ARG002
        """As `bind`, for messages that carry their own checksums; None if messages of the library cannot.

        Receives raise what `corrupted` returns. Of messages between two ranks with a tag, one in `every`
        carries checksums; such receives take the others, too.
        """
        return None


class Backend(ABC):
    """One communication library in one job. Constructed with the `World`, on all ranks alike.

    Attributes:
        name: as in configurations.
        on_stream: operations run on a CUDA stream and polls are event queries.
        spins: number of polls at full speed before a waiting rank yields.
        host_driven: operations advance only while they are polled, so a waiting rank continues to poll
            instead of sleeping.
        rings: the backend itself rings the bells of `World` whenever a poll has made progress for which a
            peer may wait.
        keeps_apart: operations of different signatures are never matched with each other in the library, in
            whatever order ranks issue them. If it is false, ranks compare every operation before it starts,
            and not only the first of a signature; not so on a stream.
        shares_connections: messages of all groups between two ranks share connections, which send them in
            the order in which they were posted.
        stops_as_whole: any call of the library may advance operations of all groups, and none can be ended:
            after a failure it is not called again in this process.
        has_algorithms: whether configurations may name algorithms of it.
        preference: its places among the backends, see `Preference`.
    """

    name: str
    on_stream: bool
    spins: int
    host_driven: ClassVar[bool] = False
    rings: ClassVar[bool] = False
    keeps_apart: ClassVar[bool] = False
    shares_connections: ClassVar[bool] = False
    stops_as_whole: ClassVar[bool] = False
    has_algorithms: ClassVar[bool] = True
    preference: ClassVar[Preference] = Preference()

    def __init__(self, world: World) -> None:
        """Initialise the library; collective over the job's ranks only if that is."""

    @classmethod
    def keeps_those_apart(cls, signature: Signature, hosts: int) -> bool:  # noqa: ARG003
        """`keeps_apart` for the operations of one signature, in a group on `hosts` hosts."""
        return cls.keeps_apart

    # -- of the library, before it is initialised -----------------------------------------------------

    @classmethod
    @abstractmethod
    def availability(cls) -> Availability:
        """Return whether the library is installed; does not initialise it."""

    @classmethod
    @abstractmethod
    def supports(cls, signature: Signature) -> Support:
        """Return the support for a signature; a function of it alone, so equal on all ranks.

        `signature.algorithm` is None or an algorithm of the backend; for an unknown name, return a "no" that
        lists the known ones.
        """

    @classmethod
    def unavailable_in(cls, world: World) -> str:  # noqa: ARG003
        """Return the reason why the backend cannot be used in this job, or '' if it can."""
        return ""

    @classmethod
    def unavailable_for(cls, world: World, group: Group) -> str:  # noqa: ARG003
        """Return the reason why it cannot be used for a group of the job, or ''; the same on all ranks."""
        return ""

    @classmethod
    def library_version(cls) -> str:
        """Return the library in use, such as `Open MPI 5.0.11`, or ''."""
        return ""

    @classmethod
    def algorithms(cls, kind: Kind, ranks: int) -> list[str]:  # noqa: ARG003
        """Return the algorithms of a kind that `tune` should compare."""
        return []

    @classmethod
    def sizes(cls, algorithm: str) -> Range:  # noqa: ARG003
        """Return the bytes for which a table's rule may name an algorithm."""
        return Range(0)

    @classmethod
    def unknown_algorithm(cls, name: str) -> str:  # noqa: ARG003
        """Return an error text if no operation has an algorithm of this name, or '' if one may have."""
        return ""

    @classmethod
    def descriptors(cls, size: int) -> int:  # noqa: ARG003
        """Return the number of file descriptors of a group of `size` ranks in each of its processes."""
        return 0

    # -- in a job -------------------------------------------------------------------------------------

    @abstractmethod
    def open(self, group: Group) -> Channel:
        """Create the library's group; collective over the group's ranks."""

    @abstractmethod
    def progress(self) -> None:
        """Let the library advance everything in flight."""

    def disconnect(self) -> None:
        """End the connections, before an unclean `close`: no rank uses this world any more."""

    @abstractmethod
    def close(self, clean: bool) -> None:
        """Close the library. If `clean` is False, operations may be stuck, and nothing may block."""

    def thread_restriction(self) -> str:
        """Return the reason why it cannot be called from two threads at once, or '' if it can."""
        return ""

    @classmethod
    def breaks(cls, error: BaseException) -> str:  # noqa: ARG003
        """Return the reason why it is unusable in this process after one of its errors, or ''."""
        return ""

    # -- at the end of a process ----------------------------------------------------------------------

    def before_exit(self) -> None:
        """Called at the end of every process that has used it."""

    def finalize(self) -> None:
        """Called after `before_exit` if all ranks end their processes."""

    @classmethod
    def switched_off(cls, reason: str) -> None:
        """Called once the library is not to be called any more in this process."""

    def leave_launcher(self) -> None:
        """Called instead of `finalize` if the library must not be called any more."""

    def abandon(self) -> None:
        """Called in a forked child, which does not have the library's threads."""


def complete(kind: type[Any]) -> type[Backend]:
    """Return a class of backends with the defaults of `Backend` for missing members."""
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

# Members of `Backend` by their former names, which backends of other packages may still have.
_FORMER: Final = {
    "serves": "unavailable_in",
    "reaches": "unavailable_for",
    "refuses_threads": "thread_restriction",
    "needs_polls": "host_driven",
}


def complete_channel(channel: Any) -> Channel:
    """Return a channel with the defaults of `Channel` for missing members."""
    return channel if isinstance(channel, Channel) else _CompletedChannel(channel)


_OPTIONAL: Final = (
    "release", "give_up", "gate", "bind_persistent", "silent_failure", "stop_operations", "streams",
)  # fmt: skip


class _CompletedChannel(Channel):
    """Wraps a channel of a class that is no `Channel`."""

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
    """The poll of a finished operation."""
    return True


def advice(same_dtype: bool, count: int) -> str:
    """Say what a receive of another size needs, which MPI would fill in part."""
    if not same_dtype:
        return ""
    return f"; a message must fill its receive: send the size first, or receive into a tensor of {count}"
