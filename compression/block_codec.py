"""`BlockCodec`: base class of codecs that a module of `mcr_plus.kernels` implements block by block."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from mcr_plus.compression.codec import PayloadCodec


class BlockCodec(PayloadCodec):
    """Codec of fixed rate whose payloads a kernel module encodes, decodes and sums.

    A subclass sets `name`, `traits` and `kernel`. `kernel` is a module with these functions; `arguments` come
    last:

        nbytes(numel)                                        bytes of a payload; without `arguments`
        encode(values, wire, *arguments)
        decode(wire, out, *arguments)
        accumulate(wire, total, factor, *arguments)
        reduce(wires, skip, total, wire, factor, *arguments)

    Values are flat float32, payloads flat uint8; each row of `wires` is a payload.
    """

    kernel: ModuleType
    arguments: tuple[Any, ...] = ()

    def wire_numel(self, numel: int) -> int:
        """Return the bytes of a payload of `numel` values."""
        return int(self.kernel.nbytes(numel))

    def _encode(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        self.kernel.encode(values, wire, *self.arguments)

    def _decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        self.kernel.decode(wire, out, *self.arguments)

    def _accumulate(self, wire: torch.Tensor, total: torch.Tensor, scale: float) -> None:
        self.kernel.accumulate(wire, total, scale, *self.arguments)

    def reduce(
        self,
        wires: torch.Tensor | Sequence[torch.Tensor],
        total: torch.Tensor,
        wire: torch.Tensor,
        *,
        skip: int,
        scale: float = 1.0,
    ) -> int:
        """Decode, sum and encode in one pass; see `PayloadCodec.reduce`."""
        assert isinstance(wires, torch.Tensor)
        self.kernel.reduce(wires, skip, total, wire, scale, *self.arguments)
        return self.wire_numel(total.numel())
