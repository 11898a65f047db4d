"""Sending end of a newcomer's state, on a rank that trains on; messages: see `state_stream`."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any, Final

import torch

from mcr_plus.elasticity import state_stream
from mcr_plus.elasticity.state_stream import StateMessage
from mcr_plus.errors import BackendError
from mcr_plus.rendezvous import stream as links
from mcr_plus.rendezvous.stream import StreamClosed, StreamConnection

_log = logging.getLogger("mcr_plus")
_NAP_S: Final = 0.25
_SAYS_EVERY: Final = 5.0  # seconds
_STEPS: Final = 4
"""Steps that may wait to be sent. A newcomer further behind cannot catch up: sending the state takes as long
as sending the gradients of about three steps."""


class StateSource:
    """Sender of a copy of model and optimizer, and of the following steps, to one newcomer, on a thread.

    Memory: a copy of everything that the optimizer changes, until it is sent, and as much again, or four
    steps, of waiting gradients. Parameters that the optimizer does not change are sent without a copy.

    Made between two steps, in the training thread. `secret`: secret of the job. `name`: name of the transfer,
    for messages. `address`: address to which the newcomer can connect.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        secret: bytes,
        name: str,
        address: str,
    ) -> None:
        self._model, self._optimizer, self._secret, self._name = model, optimizer, secret, name
        self._changed = threading.Condition()
        self._closed = False
        self._follows = True  # whether steps of the optimizer are sent
        self._copy_nbytes = 0
        self._waiting: deque[StateMessage] = deque()
        held = {
            id(each) for group in optimizer.param_groups for each in group["params"] if each.requires_grad
        }
        params = list(model.parameters())
        self._changing = {n: each for n, each in enumerate(params) if id(each) in held}
        frozen = {n: each for n, each in enumerate(params) if n not in self._changing}
        if frozen:
            self._waiting.append(state_stream.referring(state_stream.FROZEN, {"params": frozen}))
        self._append_copy()
        self._hook = optimizer.register_step_pre_hook(self._note_step)
        self._listener = links.listen(address)
        self._thread = threading.Thread(target=self._run, name=f"mcr_plus-{name}", daemon=True)
        self._thread.start()

    @property
    def place(self) -> tuple[str, int]:
        """Address to which the newcomer connects."""
        address, port = self._listener.getsockname()[:2]
        return str(address), int(port)

    @property
    def is_over(self) -> bool:
        """Whether everything is sent, or the transfer has failed."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Send the waiting messages and nothing more: the newcomer has been taken in."""
        self._hook.remove()
        with self._changed:
            self._follows = False
            self._waiting.append(StateMessage(state_stream.LAST))
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the transfer at once; a second call does nothing."""
        self._hook.remove()
        with self._changed:
            self._closed, self._follows = True, False
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join(5.0)

    # -- the training thread --------------------------------------------------------------------------

    def _append_copy(self) -> None:
        copy = state_stream.copied(
            state_stream.COPY,
            {
                "params": self._changing,
                "buffers": list(self._model.buffers()),
                "optimizer": self._optimizer.state_dict(),
            },
        )
        self._copy_nbytes = copy.nbytes
        self._waiting.append(copy)

    def _note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Keep the gradients of the step that the optimizer is about to make."""
        if not self._follows:
            return
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            self._give_up("the optimizer's step has arguments")
            return
        groups = optimizer.param_groups
        grads = [[each.grad for each in group["params"]] for group in groups]
        dense = [each for group in grads for each in group if each is not None]
        if any(each.layout is not torch.strided for each in dense):
            self._give_up("gradients are sparse")
            return
        nbytes = sum(each.nbytes for each in dense)
        with self._changed:
            waits = sum(each.nbytes for each in self._waiting if each.kind == state_stream.STEP)
            if waits + nbytes > max(self._copy_nbytes, _STEPS * nbytes):
                if all(each.kind != state_stream.COPY for each in self._waiting):
                    self._give_up("the training steps are faster than their gradients can be sent")
                    return
                # Sending FROZEN has taken this long: a new copy is shorter than the steps since the last one.
                kept = [each for each in self._waiting if each.kind == state_stream.FROZEN]
                self._waiting.clear()
                self._waiting.extend(kept)
                self._append_copy()
            settings = [{key: group[key] for key in group if key != "params"} for group in groups]
            self._waiting.append(
                state_stream.copied(state_stream.STEP, {"settings": settings, "grads": grads})
            )
            self._changed.notify_all()

    def _give_up(self, why: str) -> None:
        """Stop sending steps; the newcomer is taken in with the state that it has."""
        _log.info("elastic: newcomers get the rest of the state between two steps: %s", why)
        with self._changed:
            kept = [each for each in self._waiting if each.kind == state_stream.FROZEN]
            self._waiting.clear()
            self._waiting.extend([*kept, StateMessage(state_stream.GIVEN_UP)])
            self._follows = False
            self._changed.notify_all()

    # -- the sending thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        link: StreamConnection | None = None
        try:
            link = state_stream.accepted(self._listener, self._secret, self._name, lambda: self._closed)
            self._send_all(link)
        except StreamClosed:
            if not self._closed:
                self._say(f"it has taken nothing for {state_stream.STALLED_S:g} s")
        except (OSError, EOFError, BackendError) as error:
            self._say(str(error))
        except Exception as error:  # for example MemoryError
            self._say(f"{type(error).__name__}: {error}")
        finally:
            with self._changed:
                self._follows = False
                self._waiting.clear()
            if link is not None:
                link.close()

    def _say(self, why: str) -> None:
        if not self._closed:
            _log.info("elastic: this rank no longer sends a newcomer its state: %s", why)

    def _send_all(self, link: StreamConnection) -> None:
        has_copy = has_reached = False
        while not self._closed:
            with self._changed:
                if not self._waiting:
                    self._changed.wait(_NAP_S)
                message = self._waiting.popleft() if self._waiting else StateMessage(state_stream.ALIVE)
            if message.kind == state_stream.ALIVE:
                link.check()
                if time.monotonic() < link.moved + _SAYS_EVERY:
                    continue
            state_stream.send(link, message)
            has_copy |= message.kind == state_stream.COPY
            if message.kind == state_stream.LAST:
                return
            if has_copy and not has_reached and not self._waiting:
                state_stream.send(link, StateMessage(state_stream.REACHED))
                has_reached = True
