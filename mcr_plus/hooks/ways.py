"""How gradients travel: which of them share a bucket, and which codec it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from mcr_plus.compression.choice import between_nodes, chosen, codec_between, keeps_something
from mcr_plus.config import CompressOptions, Config, codec_of, plain_options
from mcr_plus.message import Signature, dtype_name, frozen, thawed


@dataclass(frozen=True)
class Way:
    """What the configuration says about a gradient; those of equal ways may share a bucket.

    `compress`, `backend`: as in a call; `compress` is None where the size of the bucket decides. `keeps`:
    something is kept between calls, so a bucket must be the same in every pass.
    """

    compress: tuple[tuple[str, object], ...] | bool | None = None
    backend: str | None = None
    keeps: bool = False
    encoded: bool = False

    @property
    def options(self) -> Mapping[str, Any] | bool | None:
        """`compress` as a call passes it."""
        return thawed(self.compress) if isinstance(self.compress, tuple) else self.compress


def way_of(
    config: Config, name: str, shape: Sequence[int], nbytes: int, dtype: Any, tag: str, ranks: int
) -> Way:
    """The way of the gradient of a parameter, the same on all ranks."""
    rule, options = config.gradient_way(name, nbytes, dtype_name(dtype), tag, ranks)
    own = rule is not None and rule.match.param is not None
    backend = rule.backend if rule is not None and own else None
    exempt = None if options is None else options.exempt
    if exempt is not None and exempt.covers(name, len(shape), nbytes):
        return Way(False, backend)
    return _way(options, backend, codec_between(config.options("hierarchical", rule)), explicit=own)


def _way(
    options: CompressOptions | None,
    backend: str | None,
    between: CompressOptions | None,
    *,
    explicit: bool,
) -> Way:
    """The way of a gradient; `between` nodes it may have another codec, unless the rule is for it alone."""
    if options is None:
        return Way(backend=backend)
    if options.codec == "none":
        if between is not None and not explicit:
            return Way(None, backend, keeps_something(codec_of(between), between), encoded=True)
        return Way(False if explicit else None, backend)
    keeps = keeps_something(codec_of(options), options)
    return Way(frozen(plain_options(options)) if explicit else None, backend, keeps, encoded=True)


def bucket_way(config: Config, compress: Any, values: torch.Tensor, tag: str | None, ranks: int) -> Way:
    """The way of a bucket that is not ours, as far as a hook must know it before it sends."""
    codec = frozen(compress) if isinstance(compress, Mapping) else compress
    signature = Signature(
        "all_reduce", values.dtype, tuple(values.shape), values.nbytes, "", ranks, tag=tag, compress=codec
    )
    between = between_nodes(config, signature) if compress is None else None
    return _way(chosen(config, signature), None, between, explicit=False)


def key_of(names: Sequence[str]) -> str:
    """The name of a bucket: equal wherever the same parameters share one in the same order."""
    digest = blake2b("\n".join(names).encode(), digest_size=4).hexdigest()
    return f"{names[0]}+{len(names) - 1} {digest}"
