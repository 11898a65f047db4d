"""Invitations: files that let processes outside a job receive its weights (`mcr.join_sync`).

An invitation names the source ranks and their addresses, the key of one synchronisation, and *offers*: sets
of tensors, or of parts of tensors, that a receiver may hold. An offer consists of the same parts as the
shards of ranks in the job, so each part is still encoded once. The key does not reveal the secret of the
job, but whoever reads the file can receive the weights and pose as a source. So the file is readable by its
owner alone, and refused otherwise.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from mcr_plus.config.document import read_up_to
from mcr_plus.errors import InvalidArgument, short
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.regions import Boxes, as_ints
from mcr_plus.weight_sync.shards import HeldShard, ShardAssignment, held_by, whole_of
from mcr_plus.weight_sync.weights import Layouts

FORMAT: Final = 1
"""Version of the file format; increased if readers of the previous version would misread the new one."""
WHOLE: Final = -1
"""Rank of a receiver that holds all of all tensors, among the receivers of a part. Receivers that only the
`offers` of `mcr.sync` describe have the numbers below it."""
Offers = Mapping[str, Layouts]
"""Sets of layouts by name; each set has the layouts of another job's tensors, by name of the tensor."""
_MOST: Final = 256 << 20
_PRIVATE: Final = 0o600


class ShardOffer(NamedTuple):
    """Tensors that a receiver outside the job may hold. `rank`: a receiver with the same, or `WHOLE`."""

    name: str
    rank: int
    held: Sequence[HeldShard]


class _FileModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _ListeningAddress(_FileModel):
    """Address on which a source rank listens."""

    rank: int
    host: str
    port: int


class _Tensor(_FileModel):
    """A `HeldShard`; without corners for a whole tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    corners: tuple[list[list[int]], list[list[int]]] | None = None


class _Offered(_FileModel):
    name: str
    tensors: list[_Tensor]

    @property
    def held(self) -> list[HeldShard]:
        """Shards of the offer's tensors. Raises `ValueError` for a shard that no rank can hold."""
        return [_held(tensor) for tensor in self.tensors]


class _Boxes(_FileModel):
    """Boxes of a tensor: their lowest corners, and their highest ones (exclusive)."""

    name: str
    corners: tuple[list[list[int]], list[list[int]]]


class _SentShard(_FileModel):
    """A `ShardAssignment`; `offers`: numbers of the offers that include it."""

    source: int
    dtype: str
    offers: list[int]
    boxes: list[_Boxes]

    def part(self) -> ShardAssignment:
        """Return the part, without receivers, like `parts_of`. Raises `ValueError` for an invalid part."""
        return ShardAssignment(
            self.source, (), self.dtype, [(each.name, _boxes_of(each.corners)) for each in self.boxes]
        )


class EndpointFile(_FileModel):
    """Content of an invitation file.

    Attributes:
        format: `FORMAT`.
        tag: tag of the synchronisation.
        created: time in seconds since 1970, by the clock of the lead source.
        key: key of the synchronisation, hexadecimal.
        timeout: deadline of the job's operations, in seconds.
        sources: addresses of the source ranks, the lead first.
        offers, parts: described in the module's docstring.
    """

    format: int
    tag: str
    created: float
    key: str
    timeout: float
    sources: list[_ListeningAddress]
    offers: list[_Offered]
    parts: list[_SentShard]

    @classmethod
    def of(
        cls,
        tag: str,
        created: float,
        key: bytes,
        timeout: float,
        places: Mapping[int, tuple[str, int]],
        offers: Sequence[ShardOffer],
        parts: Sequence[ShardAssignment],
    ) -> EndpointFile:
        """Return the file of a synchronisation. `places`: addresses of the source ranks."""
        return cls(
            format=FORMAT,
            tag=tag,
            created=created,
            key=key.hex(),
            timeout=timeout,
            sources=[
                _ListeningAddress(rank=rank, host=host, port=port) for rank, (host, port) in places.items()
            ],
            offers=[
                _Offered(name=each.name, tensors=[_tensor(held) for held in each.held if _is_some(held)])
                for each in offers
            ],
            parts=[
                _SentShard(
                    source=part.source,
                    dtype=part.dtype,
                    offers=[number for number, each in enumerate(offers) if each.rank in part.receivers],
                    boxes=[_Boxes(name=name, corners=_corners(boxes)) for name, boxes in part.boxes],
                )
                for part in parts
            ],
        )

    @property
    def secret(self) -> bytes:
        """Key of the synchronisation, in bytes."""
        return bytes.fromhex(self.key)

    def choose(self, held: Sequence[HeldShard]) -> tuple[int, list[ShardAssignment]]:
        """Return the number of the offer that equals the tensors of a receiver, and the offer's parts.

        Raises `InvalidArgument` with all offers, and the first difference to the most similar one.
        """
        own = _content(held)
        contents = [_content(each.held) for each in self.offers]
        if own in contents:
            number = contents.index(own)
            return number, [part.part() for part in self.parts if number in part.offers]
        names = [each.name for each in self.offers]
        differing = [
            [name for name in (*content, *own) if content.get(name) != own.get(name)] for content in contents
        ]
        nearest = min(range(len(contents)), key=lambda number: len(differing[number]))
        name = differing[nearest][0]
        raise InvalidArgument(
            f"{names[nearest]}: there {_phrase(name, contents[nearest].get(name))}, here "
            f"{_phrase(name, own.get(name))}; what may be held: {'; '.join(names)}"
        )


def checked(offers: object) -> Offers:
    """Return argument `offers` of `mcr.sync`; raises `InvalidArgument`."""
    if offers is None:
        return {}
    if not isinstance(offers, Mapping):
        raise InvalidArgument(f"sync: offers: expected a mapping of names to layouts, got {short(offers)}")
    for name, layouts in offers.items():
        if not isinstance(name, str) or not isinstance(layouts, Mapping) or not layouts:
            raise InvalidArgument(
                f"sync: offers[{name!r}]: expected a name, and a mapping of names of tensors to mcr.Layout, "
                f"got {short(layouts)}"
            )
        for tensor, layout in layouts.items():
            if not isinstance(tensor, str) or not isinstance(layout, Layout) or layout.is_partial:
                raise InvalidArgument(
                    f"sync: offers[{name!r}][{tensor!r}]: expected the name of a tensor, and an mcr.Layout "
                    f"of values, not of addends, got {short(layout)}"
                )
    return offers


def digest_of(offers: Offers) -> str:
    """Return a digest that is equal on ranks with equal offers."""
    content = [
        (name, sorted((tensor, layout.digest) for tensor, layout in offers[name].items()))
        for name in sorted(offers)
    ]
    return hashlib.sha256(repr(content).encode()).hexdigest()


def offers_of(
    held: Mapping[int, Sequence[HeldShard]], sources: Sequence[int], named: Offers | None = None
) -> list[ShardOffer]:
    """Return the offers to receivers outside the job: all tensors, `named` sets, receivers' shards.

    `held`: shards of all ranks. Raises `InvalidArgument` if nothing can be offered.
    """
    whole = whole_of(held, sources)
    offers = [] if whole is None else [ShardOffer("all of all tensors", WHOLE, whole)]
    if named:
        if whole is None:
            raise InvalidArgument(
                f"sync: offers: src={list(sources)} do not hold all of each tensor together, so that they "
                f"cannot offer parts of them: {short(sorted(named))}"
            )
        offers += _named_offers(whole, named)
    offers += [
        ShardOffer(f"what rank {rank} holds", rank, held[rank]) for rank in held if rank not in sources
    ]
    if not offers:
        raise InvalidArgument(
            f"sync: invite: src={list(sources)} do not hold all of each tensor together, and there is no "
            "receiver in the job whose part another one could hold"
        )
    different: list[ShardOffer] = []
    contents: list[Any] = []
    for each in offers:
        content = _content(each.held)
        if content not in contents:
            contents.append(content)
            different.append(each)
    return different


def _named_offers(whole: Sequence[HeldShard], named: Offers) -> list[ShardOffer]:
    """Return the shards of each rank of each set of layouts; tensors without a layout are whole."""
    tensors = {each.name: each for each in whole}
    found: list[ShardOffer] = []
    for name, layouts in sorted(named.items()):
        for tensor, layout in layouts.items():
            if tensor not in tensors:
                raise InvalidArgument(
                    f"sync: offers[{name!r}]: there is no tensor {tensor!r}; "
                    f"tensors: {short(sorted(tensors))}"
                )
            whole_shape = tensors[tensor].shape
            shape = whole_shape[:-1] if tensors[tensor].is_complex else whole_shape
            if shape != layout.shape:
                raise InvalidArgument(
                    f"sync: offers[{name!r}][{tensor!r}]: its layout, {layout}, is not of the tensor's shape "
                    f"{list(shape)}"
                )
        for rank in sorted({rank for layout in layouts.values() for rank in layout.ranks}):
            parts = [_part_of(each, layouts.get(each.name), rank) for each in whole]
            some = [each for each in parts if _is_some(each)]
            found.append(ShardOffer(f"rank {rank} of {name!r}", WHOLE - 1 - len(found), some))
    return found


def _part_of(whole: HeldShard, layout: Layout | None, rank: int) -> HeldShard:
    """Return a rank's shard of a tensor; for a complex tensor, with its last dimension of 2."""
    if layout is None:
        return whole
    return held_by(whole.name, layout, rank, whole.dtype, whole.shape[len(layout.shape) :])


def write(path: str, invitation: EndpointFile) -> Callable[[], None]:
    """Write the file, readable by its owner alone, over the previous one; returns a function that removes it.

    Raises `InvalidArgument` if the file cannot be written.
    """
    target = Path(path)
    temporary = target.parent / f".{target.name}.{secrets.token_hex(8)}"
    try:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(temporary, flags, _PRIVATE), "w") as file:
                file.write(invitation.model_dump_json(exclude_none=True))
                file.flush()
                os.fsync(file.fileno())
                status = os.fstat(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:  # ValueError: the name contains a null byte
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgument(f"sync: invite: {path!r} cannot be written: {reason}") from None
    return partial(_remove, target.absolute(), (status.st_dev, status.st_ino))


def _remove(path: Path, own: tuple[int, int]) -> None:
    """Remove the file, unless it has been replaced by another."""
    with suppress(OSError):  # the file or its folder no longer exists
        status = path.stat()
        if (status.st_dev, status.st_ino) == own:
            path.unlink()


def read(path: str) -> EndpointFile | None:
    """Return the invitation in a file; None if there is no file.

    Raises `InvalidArgument` if other users may read the file, or it is not a complete invitation.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgument(f"{path!r} cannot be read: {reason}") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise InvalidArgument(f"{path!r} is not a regular file")
    with open(descriptor, "rb") as file:
        if status.st_uid != os.geteuid():
            raise InvalidArgument(
                f"{path!r} belongs to user {status.st_uid}; expected that of this process, {os.geteuid()}"
            )
        if status.st_mode & 0o077:
            raise InvalidArgument(
                f"{path!r} has mode {stat.S_IMODE(status.st_mode):04o}, so that others may use or change it; "
                f"expected {_PRIVATE:04o}"
            )
        text = read_up_to(file, _MOST + 1)
    if len(text) > _MOST:
        raise InvalidArgument(f"{path!r} is larger than {_MOST >> 20} MiB")
    return _parsed(path, text)


def _parsed(path: str, text: bytes) -> EndpointFile:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"{path!r} is not a whole invitation: {error}; {len(text)} bytes of JSON"
        ) from None
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        raise InvalidArgument(
            f"{path!r} is not an invitation of format {FORMAT}, which this version of mcr_plus reads: "
            f"format {short(found)}"
        )
    try:
        invitation = EndpointFile.model_validate_json(text)
        for part in invitation.parts:
            part.part()
        for offer in invitation.offers:
            _content(offer.held)
        _check(invitation)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise InvalidArgument(f"{path!r} is not a whole invitation: {place}: {first['msg']}") from None
    except (ValueError, OverflowError) as error:
        raise InvalidArgument(f"{path!r} is not a whole invitation: {error}") from None
    return invitation


def _check(invitation: EndpointFile) -> None:
    """Raise `ValueError` unless the parts of each offer are the elements of its tensors, sent by sources."""
    ranks = [each.rank for each in invitation.sources]
    if not ranks or len(set(ranks)) < len(ranks) or len(invitation.secret) != 32:
        raise ValueError("expected source ranks, each once, and a key of 32 bytes")
    if not invitation.offers:
        raise ValueError("it offers nothing")
    for number, offer in enumerate(invitation.offers):
        tensors = {each.name: each for each in offer.held}
        left = {name: int(held.bounds.volumes.sum()) for name, held in tensors.items()}
        for part in invitation.parts:
            if number not in part.offers:
                continue
            for name, boxes in part.part().boxes:
                held = tensors.get(name)
                if held is None or part.source not in ranks or held.dtype != part.dtype:
                    raise ValueError(f"{offer.name}: a part of {name!r} from rank {part.source}")
                if boxes.lows.shape[1] != len(held.shape):
                    raise ValueError(f"{offer.name}: boxes of {boxes.lows.shape[1]} dimensions of {held}")
                left[name] -= int(boxes.volumes.sum())
        for name, count in left.items():
            if count:
                raise ValueError(f"{offer.name}: its parts lack {count} elements of {name!r}")


# -- conversion between the file and shards --------------------------------------------------------------


def _corners(boxes: Boxes) -> tuple[list[list[int]], list[list[int]]]:
    return boxes.lows.tolist(), boxes.highs.tolist()


def _is_some(held: HeldShard) -> bool:
    """Return whether a rank holds any element of the tensor."""
    return held.boxes is None or bool(held.boxes.volumes.any())


def _tensor(held: HeldShard) -> _Tensor:
    corners = None if held.boxes is None else _corners(held.boxes)
    return _Tensor(name=held.name, shape=tuple(held.shape), dtype=held.dtype, corners=corners)


def _boxes_of(corners: tuple[list[list[int]], list[list[int]]]) -> Boxes:
    """Return boxes from their corners. Raises `ValueError` for invalid corners."""
    lows, highs = (as_ints(side) for side in corners)
    if lows.ndim != 2 or lows.shape != highs.shape or (lows < 0).any() or (highs < lows).any():
        raise ValueError(f"corners of boxes {short(corners)}")
    return Boxes(lows, highs)


def _held(tensor: _Tensor) -> HeldShard:
    """Return the shard of a tensor. Raises `ValueError` for a shard that no rank can hold."""
    if not isinstance(getattr(torch, tensor.dtype, None), torch.dtype) or min(tensor.shape, default=0) < 0:
        raise ValueError(f"a tensor of shape {list(tensor.shape)}, {tensor.dtype}")
    if tensor.corners is None:
        return HeldShard(tensor.name, tensor.shape, tensor.dtype)
    boxes = _boxes_of(tensor.corners)
    if boxes.highs.shape[1] != len(tensor.shape) or (boxes.highs > as_ints(tensor.shape)).any():
        raise ValueError(f"corners of boxes outside of {tensor.name!r}")
    return HeldShard(tensor.name, tensor.shape, tensor.dtype, boxes)


_Content = dict[str, tuple[tuple[int, ...], str, frozenset[tuple[int, ...]]]]


def _content(held: Sequence[HeldShard]) -> _Content:
    """Return shards by name, for comparison: shape, dtype, and the set of non-empty boxes."""
    found: _Content = {}
    for each in held:
        boxes = each.bounds
        some = boxes.take(boxes.volumes > 0)
        if _is_some(each):
            rows = frozenset(map(tuple, np.concatenate(some, axis=1).tolist()))
            found[each.name] = tuple(each.shape), each.dtype, rows
    return found


def _phrase(name: str, content: tuple[tuple[int, ...], str, frozenset[tuple[int, ...]]] | None) -> str:
    if content is None:
        return f"is no '{name}'"
    shape, dtype, rows = content
    dims = len(shape)
    boxes = [list(zip(row[:dims], row[dims:], strict=True)) for row in sorted(rows)]
    part = "" if boxes == [[(0, size) for size in shape]] or not boxes else f", of which {short(boxes)}"
    return f"is '{name}' of shape {list(shape)}, {dtype}{part}"
