"""Pickling and signing of Python objects sent between the ranks of a group."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import torch

from mcr_plus.core.job_store import seal, unseal
from mcr_plus.core.kinds import ARITHMETIC
from mcr_plus.errors import BackendError, InvalidArgument

if TYPE_CHECKING:
    from mcr_plus.core.group import Group


class _Pickler(pickle.Pickler):
    """Pickler that uses torch.save for dtypes that torch pickles but cannot unpickle, such as float8."""

    def reducer_override(self, obj: Any) -> Any:
        """See `pickle.Pickler`."""
        if not isinstance(obj, torch.Tensor) or obj.dtype in ARITHMETIC:
            return NotImplemented
        written = io.BytesIO()
        torch.save(obj, written)
        return _loaded, (written.getvalue(),)


def _loaded(written: bytes) -> torch.Tensor:
    loaded: torch.Tensor = torch.load(io.BytesIO(written), weights_only=False)
    return loaded


class SignedObjects:
    """Pickler and unpickler of a group's objects, signed with the secret of the job."""

    def __init__(self, group: Group, secret: bytes) -> None:
        self._group, self._secret = group, secret

    def pickled(self, obj: Any) -> torch.Tensor:
        """Return an object as bytes (uint8, on the CPU), with this rank's signature.

        Raises `InvalidArgument` if the object cannot be pickled.
        """
        written = io.BytesIO()
        try:
            _Pickler(written, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
            what = f"obj: {type(obj).__name__} cannot be pickled: {error}"
            raise InvalidArgument(what) from error
        sealed = seal(self._secret, f"{self._group.name}/{self._group.rank}", written.getvalue())
        return torch.frombuffer(bytearray(sealed), dtype=torch.uint8)

    def unpickled(self, payload: torch.Tensor, rank: int) -> Any:
        """Return the object that rank `rank` of the group passed to `pickled`.

        Raises `BackendError` if that rank has not signed the object; the object is then not unpickled,
        because unpickling runs code of its author.
        """
        name, sealed = self._group.name, payload.numpy().tobytes()
        written = unseal(self._secret, f"{name}/{rank}", sealed)
        if written is None:
            raise BackendError(
                f"the object of {self._group.named(rank)} in group '{name}' was not signed by it, and is not "
                "unpickled"
            )
        return pickle.loads(written)
