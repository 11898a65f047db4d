"""Optional compiled path of repeated calls (`_fast_calls.c`); without it they take the same way in Python."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from mcr_plus.core.environment import compiles_calls

if TYPE_CHECKING:
    from mcr_plus.communicator.prepared import Prepared


_MORE: Final = 8  # times the polls of a collective
_INTERFACE: Final = 5  # of the functions of `_fast_calls.c`: both numbers change together


@cache
def _opened() -> tuple[Any, str]:
    """Return the extension, or None and the reason."""
    if not compiles_calls():
        return None, "switched off by MCR_FAST_CALLS=0"
    try:
        from mcr_plus.communicator import _fast_calls  # type: ignore[attr-defined]
    except ImportError:
        return None, "not built: no C compiler was found when mcr_plus was installed"
    if getattr(_fast_calls, "INTERFACE", 0) != _INTERFACE:
        return None, "built from other sources of mcr_plus: install it again"
    try:
        _fast_calls.use(torch.Tensor)
    except ImportError:
        return None, f"torch {torch.__version__} has no DLPack exchange API"
    return _fast_calls, ""


def why_not() -> str:
    """Return why repeated calls are in Python alone; empty if they are compiled."""
    return _opened()[1]


def fast_calls() -> Any:
    """Return a new `FastCalls`, or None without the extension."""
    module = _opened()[0]
    return module and module.FastCalls()


def native_run(ready: Prepared) -> Any:
    """Return the `NativeRun` of a prepared operation, or None if Python must start it."""
    operation, message = ready.issue.operation, ready.message
    if ready.issue.native is None or operation is None or _opened()[0] is None:
        return None
    engine, state = operation.engine, operation.state
    place = (message.peer, message.match_tag) if operation.signature.is_p2p else ()
    native = ready.issue.native(*place)
    if native is None:
        return None
    # An address, as an exported buffer would keep the board from closing; no call comes here after that.
    counter = np.frombuffer(state.board.counter, np.uint64).ctypes.data
    # A poll of a message is shorter, and Python's waits take the lock.
    polls = len(operation.first) * (_MORE if place else 1)
    shift = -(1 << 63) if operation.shift is None else operation.shift
    # Messages have no number, and wait behind deferred ones.
    return _opened()[0].NativeRun(
        native.begin, native.advance, polls, native.words.ctypes.data, counter, native.active,
        shift, bool(message.inputs), bool(message.outputs),
        engine.unordered if native.running is None else native.running, engine.lock if place else None,
        operation, state, engine.waiting, state.messages.append if place else state.ring.append, place,
        operation.signature,
        *operation.resuming(native.begun, message.extras), native.words,
    )  # fmt: skip
