"""The clients that need nothing but torch, in one start."""

from __future__ import annotations

from clients import ddp, fsdp, pipelining, tensor
from clients.job import main

if __name__ == "__main__":
    main({**ddp.CLIENTS, **fsdp.CLIENTS, **pipelining.CLIENTS, **tensor.CLIENTS})
