"""A world of ranks of which only this process exists: its runtime, its libraries, and torch's groups."""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from mcr_plus.backends import backend_class, preferred_backends
from mcr_plus.backends.base import NATIVE, Availability, Backend, Channel, Poll, Start, Support, done
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.config import reader as configuration
from mcr_plus.config.schema import Config
from mcr_plus.core.c10d import HashStore
from mcr_plus.core.group import Group
from mcr_plus.core.message import Message, Signature
from mcr_plus.errors import ConfigError, Unsupported
from mcr_plus.hierarchy.nodes import Part, inner_groups, nodes_of
from mcr_plus.job import init, opening
from mcr_plus.job.process import job
from mcr_plus.job.runtime import Runtime
from mcr_plus.rendezvous.world import World
from mcr_plus.selection.checks import use_algorithms
from mcr_plus.simulate.recorder import CallRecorder
from mcr_plus.torch_backend import process_group
from mcr_plus.torch_backend.jobs import torch_job

ValueT = TypeVar("ValueT")


class SimulatedChannel(Channel):
    """Channel whose operations are recorded, and done at once."""

    def __init__(self, recorder: CallRecorder, group: Group) -> None:
        self._recorder, self._group = recorder, group
        recorder.opened(group.name, group.ranks)

    def bind(self, signature: Signature) -> Start:  # noqa: D102
        def start(message: Message) -> Poll:
            self._recorder.start(self._group, signature, message)
            return done

        return start

    def close(self) -> None:  # noqa: D102
        pass

    release = close


class SimulatedBackend(Backend):
    """Stands for a library under its name; it has all operations, and no peers."""

    on_stream = False
    spins = 1
    keeps_apart = True
    recorder: CallRecorder

    def __init__(self, world: World) -> None:
        pass

    @classmethod
    def availability(cls) -> Availability:  # noqa: D102
        return Availability(True, "simulated")

    @classmethod
    def supports(cls, signature: Signature) -> Support:  # noqa: ARG003, D102
        return NATIVE

    def open(self, group: Group) -> Channel:  # noqa: D102
        return SimulatedChannel(self.recorder, group)

    def progress(self) -> None:  # noqa: D102
        pass

    def close(self, clean: bool) -> None:  # noqa: D102
        pass


class SimulatedRuntime(Runtime):
    """Runtime whose other ranks answer like this one."""

    recorder: CallRecorder

    def open_group(  # noqa: D102
        self, name: str, ranks: tuple[int, ...], config: Config | None = None, *, checked: bool = False
    ) -> Communicator:
        made = super().open_group(name, ranks, config, checked=checked)
        made.attached["unheard"] = ranks  # layouts compute what these would say
        made.attached["found"] = ChainMap(self.recorder.record.values, self.recorder.known)  # for later ranks
        return made

    def agree(  # noqa: D102
        self,
        communicator: Communicator,
        value: ValueT,
        what: str,
        sizes: Callable[[Sequence[ValueT]], Sequence[int]],  # noqa: ARG002
    ) -> list[ValueT]:
        if what != "split":
            return [value] * communicator.size
        choices: list[Any] | None = communicator.attached.pop("choices", None)
        if choices is None:
            raise Unsupported("split: the colours of other ranks are not known; expected mcr.new_group")
        rows = zip(choices, communicator.ranks, strict=True)
        groups: dict[Any, list[int]] = defaultdict(list)
        for (colour, _), rank in sorted(rows, key=lambda row: row[0][1]):
            groups[colour].append(rank)
        self.recorder.record.inner += [tuple(groups[colour]) for colour in {*groups} - {None}]
        return choices

    def new_group(self, ranks: Sequence[int]) -> Communicator:  # noqa: D102
        self.recorder.created(tuple(ranks))
        return super().new_group(ranks)


class SimulatedCluster:
    """Gives programs of this process the world of one rank, whatever they call to join it."""

    def __init__(self, recorder: CallRecorder, world: World) -> None:
        self.recorder, self.world = recorder, world
        self.libraries: tuple[str, ...] | None = None  # those that a program of torch has named

    def install(self) -> None:
        """Replace the functions in which a job would meet other processes, for the rest of the process."""
        self._usual: Any = c10d._new_process_group_helper
        replaced: dict[Any, dict[str, Any]] = {
            init: {"begin": self._begin, "_find_ranks": lambda *_: self.world},
            # Other ranks have opened the same libraries.
            opening: {"_missing": lambda *_: {}, "inner_groups": self._inner_groups},
            process_group: {"communicator_of": self._communicator_of},
            c10d: {
                "rendezvous": self._rendezvous,
                "_store_based_barrier": lambda *_, **__: None,
                "_new_process_group_helper": self._new_process_group,
            },
        }
        for module, functions in replaced.items():
            vars(module).update(functions)
        register_optimizer_step_post_hook(self.recorder.stepped)

    def _begin(
        self, loaded: Config | ConfigError, world: World, timeout: float | None, *, native: bool = True
    ) -> Runtime:
        if isinstance(loaded, ConfigError):
            raise loaded
        job.install_handlers()
        for hook in job.hooks:
            hook.check(loaded)
            hook.prepare(loaded, world)
        use_algorithms(loaded)
        names = self.libraries or loaded.backends or preferred_backends()
        # Shared memory ends at a host; NCCL's operations would be on a stream.
        other = {"local", "nccl", *(["msccl"] if len({*world.hosts}) > 1 else [])}
        usable = [name for name in names if name not in other] or names
        classes = {name: self._class(name) for name in usable}
        SimulatedRuntime.recorder = self.recorder
        runtime = SimulatedRuntime(
            loaded, world, {**classes, "local": backend_class("local")}, loaded, timeout, native=native
        )
        runtime.add_hook(self.recorder)
        job.begin(runtime)
        if native:
            self.recorder.created(runtime.communicator.ranks)
        self.recorder.resume()
        return runtime

    def _inner_groups(self, config: Config, hosts: Sequence[str], group: Group) -> Mapping[Any, Group]:
        """Return the groups by node, and note those of the other nodes."""
        nodes = nodes_of(config, hosts, group)
        if not isinstance(nodes, str):
            parts: tuple[Part, ...] = ("intra", "inter")
            self.recorder.record.inner += [
                tuple(group.ranks[rank] for rank in ranks) for part in parts for ranks in nodes.groups(part)
            ]
        return inner_groups(config, hosts, group)

    def _class(self, name: str) -> type[Backend]:
        like = backend_class(name)
        members = {"name": name, "recorder": self.recorder, "preference": like.preference}
        return type(f"Simulated_{name}", (SimulatedBackend,), members)

    # -- torch --------------------------------------------------------------------------------------

    def _rendezvous(self, _url: str, rank: int = -1, world_size: int = -1, **_: object) -> Iterator[Any]:
        mine, theirs = (self.world.rank, self.world.size), (rank, world_size)
        for what, own, given in zip(("rank", "world_size"), mine, theirs, strict=True):
            if given not in (-1, own):
                raise Unsupported(f"init_process_group: {what}={given}; the simulated job has {own}")
        yield HashStore(), *mine

    def _new_process_group(
        self,
        size: int,
        rank: int,
        ranks: Sequence[int],
        backend: Any,
        _store: Any,
        *others: Any,
        **named: Any,
    ) -> Any:
        """Make a group of backend `mcr` for any name, under the name that the program has given."""
        self.recorder.created(tuple(ranks) or tuple(range(size)))
        known = ("nccl", "gloo", "mpi")
        wanted = str(backend).lower()
        if self.libraries is None and "mcr" not in wanted:
            self.libraries = (next((name for name in known if name in wanted), "gloo"),)
        if wanted != "mcr":
            named |= {"backend_options": None, "device_id": None}
        made, prefix = self._usual(size, rank, ranks, "mcr", HashStore(), *others, **named)
        if made is not dist.GroupMember.NON_GROUP_MEMBER:
            c10d._world.pg_map[made] = (dist.Backend(wanted), prefix)
        return made, prefix

    def _communicator_of(
        self, _store: Any, _rank: int, size: int, _timeout: Any, ranks: Sequence[int], name: str, options: Any
    ) -> Communicator:
        if (prepared := torch_job.prepared) is not None:
            torch_job.prepared = None
            return prepared
        running, members = job.runtime, tuple(ranks) or tuple(range(size))
        if running is not None and not running.closed:
            return torch_job.open(running, members, name, running.loaded)
        plain = {"version": 1, "pipeline": [{"select": {}}, {"dispatch": {}}]}
        loaded = configuration.load(options if self.libraries is None else plain)
        running = self._begin(loaded, self.world, None, native=False)
        torch_job.enter(running, members, joined=True)
        torch_job.use(running.communicator)
        return running.communicator
