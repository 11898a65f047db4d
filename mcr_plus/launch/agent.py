"""Start ranks through torchrun's elastic agent: `python -m mcr_plus.launch.agent RANKS FOLDER COMMAND…`.

The agent is a separate process, so that `mcr-plus run` monitors it like mpiexec. It serves one host and never
restarts ranks.
"""

from __future__ import annotations

import os
import sys
from typing import cast

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from mcr_plus.core.c10d import PrefixStore
from mcr_plus.core.environment import LOOPBACK
from mcr_plus.rendezvous.store_connections import served

_MONITOR_INTERVAL_S = 0.05


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous of a single agent, with a store on loopback."""

    def __init__(self) -> None:
        """Open the store."""
        self._store = served()

    @property
    def use_agent_store(self) -> bool:
        """Return True: ranks connect to this store, and rank 0 opens none."""
        return True

    def get_backend(self) -> str:
        """Return the name that torch's logs show."""
        return "mcr-loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store; the only agent is rank 0 of 1."""
        address = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore("mcr_plus.agent", self._store), 0, 1, address)

    def is_closed(self) -> bool:
        """Return False: the rendezvous stays open while the process runs."""
        return False

    def set_closed(self) -> None:
        """Do nothing: no other agent could join."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other agent can join."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return os.environ.get("MCR_JOB_ID", "mcr_plus")

    def shutdown(self) -> bool:
        """Return True; the store is closed when the process exits."""
        return True


def main() -> int:
    """Start the ranks and wait for them; return 1 if one failed."""
    ranks, folder, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    spec = WorkerSpec(
        role="rank",
        local_world_size=ranks,
        rdzv_handler=LoopbackRendezvous(),
        entrypoint=command[0],
        args=tuple(command[1:]),
        max_restarts=0,
        monitor_interval=_MONITOR_INTERVAL_S,
    )
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=folder))
    try:
        result = cast("RunResult | None", agent.run())
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 1 if result is None or result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
