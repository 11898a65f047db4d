"""The backend NCCL: the library, and the channels of its groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from mcr_plus.backends.base import Availability, Backend, Channel, Preference, Support
from mcr_plus.core.environment import default_variable
from mcr_plus.core.group import Group
from mcr_plus.core.message import Signature
from mcr_plus.core.streams import Streams, streams_of
from mcr_plus.errors import BackendError, BackendUnavailable, Unsupported
from mcr_plus.rendezvous.world import World

if TYPE_CHECKING:
    from mcr_plus.backends.nccl.abi import Nccl, NcclError
    from mcr_plus.backends.nccl.channel import NcclChannel

_ABORT_PATIENCE: Final = 10.0


class NcclBackend(Backend):
    """NCCL on the current CUDA device at the creation of a group; ranks of a group use different devices.

    `library`: path of another library with NCCL's ABI, set by subclasses.
    """

    name = "nccl"
    on_stream = True
    has_algorithms = False
    spins = 1
    preference = Preference(cuda=1)
    library: ClassVar[str | None] = None

    def __init__(
        self,
        world: World,
        *,
        nccl: Nccl | None = None,
        streams: Callable[[], Streams] = lambda: streams_of(torch.device("cuda")),
    ) -> None:
        self._world = world
        if world.single_host:
            # By default NCCL listens on the network, which a single host does not need.
            default_variable("NCCL_SOCKET_IFNAME", "lo")
        from mcr_plus.backends.nccl.abi import load

        self._nccl = nccl or load(self.library)
        self._streams = streams
        self._channels: list[NcclChannel] = []

    @classmethod
    def library_version(cls) -> str:
        """Version of the loaded NCCL: `NCCL 2.28.3`."""
        from mcr_plus.backends.nccl.abi import load

        return f"NCCL {load(cls.library).version_text}"

    @classmethod
    def availability(cls) -> Availability:
        """Report NCCL as available with a CUDA device and a library; queries NVML, not CUDA."""
        if torch.cuda.device_count() == 0:
            built = torch.version.cuda is not None
            return Availability(
                False,
                reason="no CUDA device is visible" if built else "this build of torch has no CUDA",
                remedy="run on a host with an NVIDIA GPU and driver; see CUDA_VISIBLE_DEVICES"
                if built
                else "install a CUDA build of torch, on a host with an NVIDIA GPU",
            )
        try:
            return Availability(True, cls.library_version())
        except BackendUnavailable as error:
            from mcr_plus.backends.nccl.abi import REMEDY

            return Availability(False, reason=str(error), remedy=REMEDY)

    @classmethod
    def supports(cls, signature: Signature) -> Support:
        """Support all operations on CUDA tensors except reductions that NCCL lacks."""
        from mcr_plus.backends.nccl.channel import support  # here: not needed without a GPU

        return support(signature)

    def open(self, group: Group) -> Channel:
        """See `Backend.open`. Waits for the group's ranks, at most for the world's timeout.

        Raises:
            BackendError: NCCL failed.
            CommTimeout: not all ranks joined in time.
        """
        if self._world.store is None and group.size > 1:
            raise Unsupported("backend nccl needs the store of a running job")
        from mcr_plus.backends.nccl.abi import NcclError
        from mcr_plus.backends.nccl.channel import NcclChannel

        channel = NcclChannel(
            self._nccl, self._streams(), group, self._world, self.progress, self._channels.remove, self.name
        )
        self._channels.append(channel)
        try:
            channel.connect()
        except NcclError as error:
            channel.abort()
            where = f"backend nccl: group '{group.name}', {group.named(group.rank)}, {group.size} in all"
            raise BackendError(f"{where}: {error}{self._advice(error)}") from error
        except Exception:
            channel.abort()
            raise
        return channel

    def _advice(self, error: NcclError) -> str:
        from mcr_plus.backends.nccl.abi import INVALID_USAGE

        if error.code != INVALID_USAGE and "duplicate gpu" not in str(error).lower():
            return ""
        return (
            ". If ranks share a GPU: give each its own (torch.cuda.set_device before mcr.init), or set "
            f"NCCL_MULTI_RANK_GPU_ENABLE=1, which needs NCCL 2.30 (this is {self._nccl.version_text})"
        )

    def progress(self) -> None:
        """Launch operations that were queued while NCCL was connecting; other operations need no host."""
        for channel in self._channels:
            channel.progress()

    def close(self, clean: bool) -> None:
        """See `Backend.close`. An abort may block, so it runs in a thread with a time limit."""
        channels = list(self._channels)
        if clean:
            for channel in channels:
                channel.close()
            return
        self._channels.clear()
        thread = threading.Thread(target=_abort, args=(channels,), daemon=True)
        thread.start()
        thread.join(_ABORT_PATIENCE)


def _abort(channels: Sequence[NcclChannel]) -> None:
    for channel in channels:
        channel.abort()
