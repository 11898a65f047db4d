"""Limit of file descriptors, checked before a group is opened.

A library that runs out of descriptors while it opens a group leaves its peers waiting, and gloo ends the
process. So all ranks first exchange the number of descriptors they have left.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Mapping, Sequence
from typing import Any, Final

_RESERVE: Final = 24  # reserve for short-lived descriptors and for the program
_OWN: Final = 1  # every group's board
_UNKNOWN: Final = 1 << 30

_log = logging.getLogger("mcr_plus")


def descriptors_for(backends: Mapping[str, Any], size: int) -> int:
    """Return the number of descriptors that a group of `size` ranks may need in each of its processes."""
    return _OWN + sum(int(backend.descriptors(size)) for backend in backends.values())


def descriptors_left(need: int) -> int:
    """Return the descriptors left; raise this process's soft limit to the hard one for `need`."""
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # not Linux
        return _UNKNOWN
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _left(soft, used) < need and _left(hard, used) > _left(soft, used):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            _log.debug("the limit of %d file descriptors could not be raised: %s", soft, error)
        else:
            _log.debug("raised the limit of file descriptors from %d to %d", soft, hard)
            soft = hard
    return _left(soft, used)


def _left(limit: int, used: int) -> int:
    return _UNKNOWN if limit == resource.RLIM_INFINITY else max(0, limit - used - _RESERVE)


def lacking_descriptors(ranks: Sequence[int], left: Sequence[int], needs: Sequence[int]) -> str:
    """Return an error text for ranks with too few descriptors, with remedies; empty if all have enough."""
    short = [
        (rank, there, need) for rank, there, need in zip(ranks, left, needs, strict=True) if there < need
    ]
    if not short:
        return ""
    rank, there, need = short[0]
    subject = f"rank {rank} has" if len(short) == 1 else f"ranks {[rank for rank, _, _ in short]} have"
    return (
        f"{subject} too few file descriptors left: {there} (and {_RESERVE} in reserve) where {need} are "
        "needed; close groups that are no longer used (group.close()), or raise the limit where the job is "
        "started (ulimit -n, docker run --ulimit nofile=…, LimitNOFILE=)"
    )
