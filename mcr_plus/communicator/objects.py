"""Python objects as they travel between the ranks of a group: pickled and signed."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch

from mcr_plus.errors import BackendError
from mcr_plus.rendezvous.signing import seal, unseal

if TYPE_CHECKING:
    from mcr_plus.core.group import Group
    from mcr_plus.runtime.runtime import Runtime


class SignedObjects:
    """Pickles objects for the peers of a group, and unpickles theirs, signed with the secret of the job."""

    def __init__(self, group: Group, runtime: Runtime) -> None:
        self._group = group
        self._runtime = runtime

    def pickled(self, obj: Any) -> torch.Tensor:
        """An object as it travels: bytes (uint8, on the CPU), signed as this rank's in this group."""
        written = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
        sealed = seal(self._runtime.world.secret, f"{self._group.name}/{self._group.rank}", written)
        return torch.frombuffer(bytearray(sealed), dtype=torch.uint8)

    def unpickled(self, payload: torch.Tensor, rank: int) -> Any:
        """The object that `pickled` was given on `rank`, counted in the group.

        Raises `BackendError` if that rank has not signed it: unpickling runs code of the object's author.
        """
        name, sealed = self._group.name, payload.numpy().tobytes()
        written = unseal(self._runtime.world.secret, f"{name}/{rank}", sealed)
        if written is None:
            raise BackendError(
                f"the object of rank {rank} in group '{name}' was not signed by it, and is not unpickled"
            )
        return pickle.loads(written)
