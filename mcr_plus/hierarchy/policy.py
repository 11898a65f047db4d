"""Look up the codec of the step between nodes, for decisions before the hierarchical stage."""

from __future__ import annotations

from mcr_plus.compression.options import CompressOptions
from mcr_plus.config.schema import Config
from mcr_plus.core.kinds import dtype_name
from mcr_plus.core.message import Signature
from mcr_plus.hierarchy.options import HierarchicalOptions


def between_nodes(config: Config, signature: Signature) -> CompressOptions | None:
    """Return the codec options of the step between nodes; None if no codec is named."""
    dtype, ranks = dtype_name(signature.dtype), signature.ranks
    rule = config.rule_for(signature.kind, signature.nbytes, dtype, signature.tag, ranks=ranks)
    return codec_between(config.options("hierarchical", rule))


def codec_between(options: object) -> CompressOptions | None:
    """Return the codec options among the options of the hierarchical stage; None if no codec is named."""
    compress = options.inter.compress if isinstance(options, HierarchicalOptions) else None
    return None if compress is None or compress.codec == "none" else compress
