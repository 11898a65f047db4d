"""The seams of the system: stage, backend, and what passes between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from mcr_plus.environment import usable_cores
from mcr_plus.group_store import GroupStore
from mcr_plus.message import Group, Message, Signature

if TYPE_CHECKING:
    from mcr_plus.c10d import Store
    from mcr_plus.config import Config
    from mcr_plus.dispatch.bells import Bells
    from mcr_plus.dispatch.stage import GroupRuntime
    from mcr_plus.dispatch.work import Work
    from mcr_plus.pipeline import Pipeline

Issue = Callable[[Message], "Work"]
"""Start an operation and return its handle; never waits for a peer."""

Poll = Callable[[], bool]
"""Whether a started operation is done; drives its library's progress; raises what went wrong."""


class StreamPoll(Protocol):
    """The poll of an operation on a CUDA stream.

    `ready` tells whether the operation has been handed to its stream; before that its library still needs
    the host. The other two may be called once it is ready, and never block.
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
        """Run `function` under the operation's stream; the operation is done when that is done too."""
        ...


Start = Callable[[Message], Poll]
"""Hand an operation to a library; returns at once."""


class Persistent(Protocol):
    """A library's persistent request: how to start it, and its poll. The first start may change both."""

    begin: Callable[[], object]
    test: Poll


class Gate(Protocol):
    """What a library wants done, on all ranks, before it is handed an operation.

    Called when all ranks have issued the operation, in the order of their group; returns a poll that is true
    once the operation may start, or None if it may at once. The poll raises `OperationsDiffer` if it finds
    that ranks have issued different ones. `every`: whether each operation of the signature has to pass;
    `again`: whether the next one has to, and be compared on all ranks. Both may change while one passes.
    """

    every: bool
    again: bool

    def __call__(self, message: Message) -> Poll | None:
        """Begin."""
        ...


@dataclass(frozen=True)
class Support:
    """How a backend does an operation.

    `native` is one call of the library; `emulated` says in `how` what it is made of; for `no`, `how` says
    what is missing and what is supported instead.
    """

    level: Literal["native", "emulated", "no"]
    how: str = ""

    def __bool__(self) -> bool:
        return self.level != "no"


NATIVE = Support("native")


@dataclass(frozen=True)
class Availability:
    """Whether a backend can run here; if not, why, and what to install or do."""

    available: bool
    version: str = ""
    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class World:
    """What backends and stages know about the job.

    `store` is the job's own key-value store (a `torch.distributed.Store`), None for a single process and
    while explaining. `hosts` has one entry per global rank. `libraries` names what is behind each backend on
    rank 0 (`Open MPI 5.0.11`), where that is known. `cores`: on how many the ranks of this host may run,
    all of them together, for launchers bind each to its own. `secret`: what only the ranks have, empty if
    they have none. `bells`: how ranks of this host that sleep are woken; compiled code that moves something
    for a peer rings them itself. `stores`: see `store_of`.
    """

    rank: int
    size: int
    hosts: tuple[str, ...]
    timeout: float
    store: Store | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)
    cores: int = field(default_factory=lambda: len(usable_cores()))
    secret: bytes = field(default=b"", repr=False)
    bells: Bells | None = None
    stores: dict[str, GroupStore] = field(default_factory=dict, repr=False)

    def store_of(self, group: Group) -> GroupStore:
        """The store for what ranks of `group` tell each other about it: its keys go when all have left it.

        Only for members of groups of several ranks, which have a store.
        """
        assert self.store is not None
        if group.name not in self.stores:
            self.stores[group.name] = GroupStore(self.store, group)
        return self.stores[group.name]

    @property
    def crowded(self) -> bool:
        """Whether this host has more ranks than cores for them."""
        return self.hosts.count(self.hosts[self.rank]) > self.cores

    @property
    def single_host(self) -> bool:
        """Whether all ranks share a machine."""
        return len(set(self.hosts)) <= 1


class Channel(Protocol):
    """One group of ranks inside one library. Its operations start in the same order on all ranks."""

    def bind(self, signature: Signature) -> Start:
        """Resolve everything about `signature`; raises `Unsupported` for what `supports` denies."""
        ...

    def close(self) -> None:
        """Release the library's group: once, in the same order on all ranks, with nothing in flight."""
        ...

    # One that can be closed while other ranks still use theirs also has `release() -> None`, which does that.
    # One that stays open when its library is closed has `give_up() -> None`: it may never be closed, and
    # frees what it has in reserve.


class Backend(Protocol):
    """One communication library in one job. Constructed with the `World`, on all ranks alike.

    `on_stream`: operations run on a CUDA stream and polls are event queries. `spins`: how often a waiting
    rank polls at full speed before it gives way. `progress` drives operations that need the host.

    A backend may also have a class method `library_version() -> str`, which names the library in use,
    such as `Open MPI 5.0.11`, and an attribute `needs_polls`: true if its operations advance only while they
    are polled, so that a rank that waits for one polls on instead of sleeping. `rings`: it rings the bells of
    `World` itself whenever a poll has moved something that a peer may wait for. Such a backend also has a
    method `refuses_threads() -> str`: why it cannot be called from two threads at once, empty if it can.
    `serves(world) -> str` and `reaches(world, group) -> str`, class methods, say why it can have no part in a
    job or in a group of it, empty if it can. `algorithms(kind, ranks) -> list[str]`, another one, names those
    of its algorithms that `tune` should compare; `sizes(algorithm) -> Range` gives the bytes for which a
    table's rule may name one; `unknown_algorithm(name) -> str` says why there is none of this name for
    any operation, empty if there is, so that a configuration can be refused when it is loaded.
    `descriptors(size) -> int`: how many file descriptors a group of so many ranks takes in each process.

    `keeps_apart`, an attribute: true if operations of different signatures never meet in the library,
    whatever order ranks issue them in. Where it is missing or false, ranks compare every operation before it
    starts, and not only the first of a signature; not so on a stream. A channel may have
    `gate(signature, digest) -> Gate` and `bind_persistent(signature, message, digest) -> Persistent | None`.
    The first of a group with an attribute `ballots` has it set before the first `bind`, see
    `SharedBoard.cast`.
    `breaks(error) -> str` says why the library is of no use in this process after one of its own errors,
    empty if it still is.
    """

    name: str
    on_stream: bool
    spins: int

    def __init__(self, world: World) -> None: ...

    @classmethod
    def availability(cls) -> Availability:
        """Looks at what is installed; does not initialise the library."""
        ...

    @classmethod
    def supports(cls, signature: Signature) -> Support:
        """A function of the signature alone, so equal on all ranks.

        `signature.algorithm` is None or one of the backend's own; a name it does not know is a "no" that
        lists those it does.
        """
        ...

    def open(self, group: Group) -> Channel:
        """Create the library's group; collective over the group's ranks."""
        ...

    def progress(self) -> None:
        """Let the library advance everything in flight."""
        ...

    def close(self, clean: bool) -> None:
        """End the library. `clean` is False when operations may be stuck: then nothing may block."""
        ...


class Next(Protocol):
    """The rest of the pipeline, as a stage sees it while binding."""

    def __call__(self, signature: Signature) -> Issue:
        """The bound rest of the pipeline for `signature`, which may differ from the stage's own.

        With another kind, dtype or shape it is bound as an asynchronous operation, so that a stage may have
        several in flight.
        """
        ...

    def through(self, pipeline: Pipeline, signature: Signature) -> Issue:
        """Bind an operation of another group, by that group's pipeline, as a part of this one."""
        ...

    def note(self, text: str, details: Callable[[], Mapping[str, Any]] | None = None) -> None:
        """Say what was decided and why; shown by `explain`, which alone asks for the details."""
        ...


@dataclass(frozen=True)
class Context:
    """What a stage is built with: configuration, the job, and one group.

    `backends` are those of the job, in fallback order. `runtime` is for dispatch, None while explaining.
    `parts`: the pipelines of the groups that were opened for the hierarchical stage, by what they are for.
    """

    config: Config
    world: World
    group: Group
    backends: Mapping[str, type[Backend]]
    runtime: GroupRuntime | None = None
    parts: Mapping[str, Pipeline] = field(default_factory=dict)


class Stage(Protocol):
    """A step of the pipeline, built once per group as `StageClass(options, context)`.

    `bind` is called once per signature. A stage with nothing to do returns `next(signature)` and costs
    nothing at run time. One that has something to do returns a callable closing over what it resolved; it
    may bind `next` to other signatures and issue several operations. What it decides may depend on the
    signature and the configuration alone.
    """

    def __init__(self, options: Any, context: Context) -> None: ...

    def bind(self, signature: Signature, next: Next) -> Issue:
        """Bind this stage to `signature`."""
        ...

    # A class of stages that has something to keep also has a class method `finish(stages) -> None`, called
    # once with all its stages when the job ends in good order and nothing is in flight.
    # A stage that holds operations back also has `flush() -> None`, which issues them. It is called at the
    # end of the program and by `Communicator.flush`, at the same place of the program on all ranks. One that
    # keeps memory between operations says how much as `buffer_bytes`.
