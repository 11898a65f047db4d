"""Communication policies of gradients: codec, backend, and the right to share a bucket."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import torch

from mcr_plus.compression.options import CompressOptions, codec_of
from mcr_plus.compression.policy import gradient_compression, is_stateful, resolve_options
from mcr_plus.config.options import plain_options
from mcr_plus.config.schema import Config
from mcr_plus.core.kinds import dtype_name
from mcr_plus.core.message import Signature, frozen, thawed
from mcr_plus.hierarchy.policy import between_nodes, codec_between

_log = logging.getLogger("mcr_plus")
TAG: Final = "gradients"
"""Tag of the all_reduces of gradients."""


@dataclass(frozen=True)
class GradientPolicy:
    """Communication policy of a gradient; gradients of equal policies may share a bucket.

    `compress`, `backend`: as in a call; `compress` is None if the size of the bucket decides. `encoded`: True
    if a codec may apply. `keeps`: True if the codec keeps state, so a bucket must be the same in every pass.
    """

    compress: tuple[tuple[str, object], ...] | bool | None = None
    backend: str | None = None
    keeps: bool = False
    encoded: bool = False

    @property
    def options(self) -> Mapping[str, Any] | bool | None:
        """Value for the argument `compress` of a call."""
        return thawed(self.compress) if isinstance(self.compress, tuple) else self.compress


class Choice(NamedTuple):
    """Library and codec of a bucket in a plan; None leaves the choice to the pipeline."""

    library: str | None = None
    codec: str | None = None


def with_codec(policy: GradientPolicy, codec: str) -> GradientPolicy:
    """Return the policy with another codec and its default options."""
    return replace(policy, compress=frozen({"codec": codec}), encoded=True)


def not_choosable(name: str, config: Config) -> str | None:
    """Return the reason why a plan cannot choose a codec for buckets; None if it can."""
    if config.options("compress") is None:
        return "the pipeline has no stage `compress`; add it with `compress: {}`"
    options = CompressOptions(codec=name)
    codec = codec_of(options)
    if is_stateful(codec, options):
        return f"{name!r} has state, which needs the same buckets in every step"
    if codec.traits.sparse or codec.traits.needs_error_feedback:
        return f"{name!r} needs error feedback, whose state needs the same buckets in every step"
    return None


def policy_for(
    config: Config, name: str, shape: Sequence[int], nbytes: int, dtype: Any, tag: str, ranks: int
) -> GradientPolicy:
    """Return the policy for the gradient of a parameter, equal on all ranks."""
    rule, options = gradient_compression(config, name, nbytes, dtype_name(dtype), tag, ranks)
    own = rule is not None and rule.match.param is not None
    backend = rule.backend if rule is not None and own else None
    exempt = None if options is None else options.exempt
    if exempt is not None and exempt.covers(name, len(shape), nbytes):
        return GradientPolicy(False, backend)
    return _policy(options, backend, codec_between(config.options("hierarchical", rule)), explicit=own)


def warn_of_unmatched(config: Config, names: Sequence[str]) -> None:
    """Log a warning for rules whose `param` matches no parameter of the model: it may be misspelt."""
    for rule in config.rules:
        glob = rule.match.param
        if glob is not None and not any(fnmatchcase(name, glob) for name in names):
            _log.warning("%s: param %r matches no parameter of the model", rule.place, glob)


def _policy(
    options: CompressOptions | None,
    backend: str | None,
    between: CompressOptions | None,
    *,
    explicit: bool,
) -> GradientPolicy:
    """Return the policy for resolved options.

    `between`: the codec options between nodes, if any. `explicit`: True if a rule names the parameter; the
    rule then takes precedence over `between`.
    """
    if options is None:
        return GradientPolicy(backend=backend)
    if options.codec == "none":
        if between is not None and not explicit:
            return GradientPolicy(None, backend, is_stateful(codec_of(between), between), encoded=True)
        return GradientPolicy(False if explicit else None, backend)
    keeps = is_stateful(codec_of(options), options)
    return GradientPolicy(frozen(plain_options(options)) if explicit else None, backend, keeps, encoded=True)


def policy_for_bucket(
    config: Config, compress: Any, values: torch.Tensor, tag: str | None, ranks: int
) -> GradientPolicy:
    """Return the policy for a bucket of another library, such as DDP; `values` are its elements."""
    codec = frozen(compress) if isinstance(compress, Mapping) else compress
    signature = Signature(
        "all_reduce", values.dtype, tuple(values.shape), values.nbytes, "", ranks, tag=tag, compress=codec
    )
    between = between_nodes(config, signature) if compress is None else None
    return _policy(resolve_options(config, signature), None, between, explicit=False)


def key_of(names: Sequence[str]) -> str:
    """Return the name of a bucket of these parameters; it depends on their order."""
    digest = blake2b("\n".join(names).encode(), digest_size=4).hexdigest()
    return f"{names[0]}+{len(names) - 1} {digest}"
