"""Receiving end of a newcomer's state, while the others train; messages: see `state_stream`."""

from __future__ import annotations

import logging
import queue
import threading
import time
from contextlib import suppress
from typing import Any, Final

import torch

from mcr_plus.elasticity import state_stream
from mcr_plus.errors import BackendError
from mcr_plus.kernels.digest import digest
from mcr_plus.membership.request import TRIES, JoinRequest
from mcr_plus.rendezvous import stream as links
from mcr_plus.rendezvous.stream import StreamClosed, StreamConnection

_log = logging.getLogger("mcr_plus")
_ENDS_WITHIN: Final = 5.0  # seconds without a byte before giving up, once the others wait for this process
_TRIES: Final = 2  # attempts to connect
_AHEAD: Final = 2  # messages received ahead of the one being applied
_Queue = queue.Queue[tuple[int, Any]]


class StateReceiver:
    """Receiver of the state of model and optimizer; repeats the steps of the training ranks.

    Only receiving runs on a thread of its own; the rest runs in the caller of `poll` and `finish`.

    Attributes:
        has_parts: whether parts of the state have been received.
        is_ready: whether the process is ready to be taken in.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._params = list(model.parameters())
        self.has_parts = self.is_ready = False
        self._attempt = 0
        self._over = False  # no more messages follow
        self._closed = False
        self._link: StreamConnection | None = None
        self._thread: threading.Thread | None = None
        self._came: _Queue = queue.Queue(_AHEAD)
        self._began = self._seen = 0.0

    def poll(self, request: JoinRequest) -> bool:
        """Make progress, while this newcomer waits; returns whether anything has moved.

        Raises `RuntimeError` if the store does not answer.
        """
        if self._over:
            return False
        if self._thread is None:
            if not request.has_source(self._attempt):
                return False
            place = request.source(self._attempt)
            if place is None:
                self._fail(request, "no rank can send it")
            else:
                self._begin(place, request)
            return True
        try:
            kind, state = self._came.get_nowait()
        except queue.Empty:
            if not self._thread.is_alive() and self._came.empty():
                self._fail(request, "the connection has ended")
                return True
            moved = self._moved() > self._seen
            self._seen = time.monotonic()
            return moved
        try:
            self._apply(kind, state)
        except Exception as error:  # in the program's optimizer; the state is later compared and resent
            self._attempt = TRIES
            self._fail(request, f"{type(error).__name__}: {error}")
            return True
        if kind in (state_stream.REACHED, state_stream.GIVEN_UP) and not self.is_ready:
            self.is_ready = True
            request.be_ready()
        return True

    def finish(self) -> None:
        """Apply the remaining messages, after this process was taken in; a second call does nothing."""
        while self._thread is not None and not self._over:
            try:
                kind, state = self._came.get(timeout=0.05)
            except queue.Empty:
                stalls = time.monotonic() > self._moved() + _ENDS_WITHIN
                self._over = stalls or (not self._thread.is_alive() and self._came.empty())
                continue
            try:
                self._apply(kind, state)
            except Exception as error:  # as in `poll`
                _log.info("elastic: steps of the other ranks could not be repeated: %s", error)
                self._over = True
            self._over |= kind in (state_stream.LAST, state_stream.GIVEN_UP)
        self.close()

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        self._closed = self._over = True
        if self._link is not None:
            self._link.close()
        if self._thread is not None:
            self._thread.join(5.0)

    def _fail(self, request: JoinRequest, why: str) -> None:
        """Ask for another source, or go on without one."""
        _log.info("elastic: this process does not get the state beside training: %s", why)
        if self._link is not None:
            self._link.close()
        self._thread = self._link = None
        self._came = queue.Queue(_AHEAD)
        if self.is_ready:  # the job takes it in anyway
            self._over = self._closed = True
            return
        if self._attempt < TRIES:
            request.note_failure(self._attempt)
            self._attempt += 1
        if self._attempt >= TRIES:
            self._over = self._closed = self.is_ready = True
            request.be_ready()

    def _moved(self) -> float:
        """Return the time of the last received bytes."""
        link = self._link
        return self._began if link is None else max(self._began, link.moved)

    def _apply(self, kind: int, state: Any) -> None:
        if kind == state_stream.STEP:
            self._repeat(state["settings"], state["grads"])
        elif kind in (state_stream.FROZEN, state_stream.COPY):
            with torch.no_grad():
                for number, values in state["params"].items():
                    self._params[number].copy_(values)
                for buffer, values in zip(self._model.buffers(), state.get("buffers", ()), strict=False):
                    buffer.copy_(values)
            if kind == state_stream.COPY:
                self._optimizer.load_state_dict(state["optimizer"])
            self.has_parts = True

    def _repeat(self, settings: list[dict[str, Any]], grads: list[list[torch.Tensor | None]]) -> None:
        """Make a step of the optimizer with these gradients."""
        groups = self._optimizer.param_groups
        for group, values, of_group in zip(groups, settings, grads, strict=True):
            group.update(values)
            for param, grad in zip(group["params"], of_group, strict=True):
                param.grad = None if grad is None else grad.to(param.device)
        try:
            state_stream.without_hooks(self._optimizer, self._optimizer.step)
        finally:
            for group in groups:
                for param in group["params"]:
                    param.grad = None

    # -- the receiving thread -------------------------------------------------------------------------

    def _begin(self, place: tuple[str, int], request: JoinRequest) -> None:
        secret = request.root.secret
        digest(torch.zeros(1, device="cpu"))  # compile it before the others must wait for it
        self._began = time.monotonic()
        self._thread = threading.Thread(
            target=self._receive_all,
            args=(place, secret, request.number, self._came),
            name="mcr_plus-precopy",
            daemon=True,
        )
        self._thread.start()

    def _receive_all(
        self,
        place: tuple[str, int],
        secret: bytes,
        number: int,
        came: _Queue,
    ) -> None:
        def ends() -> bool:
            return self._closed or time.monotonic() > self._moved() + state_stream.STALLED_S

        link: StreamConnection | None = None
        with suppress(OSError, EOFError, BackendError, StreamClosed):
            try:
                link = self._link = links.connect(place, secret, number, ends, _TRIES)
                kind = state_stream.ALIVE
                while kind != state_stream.LAST:
                    kind, state = state_stream.receive(link)
                    while kind != state_stream.ALIVE:
                        if self._closed:
                            return
                        with suppress(queue.Full):
                            came.put((kind, state), timeout=0.25)
                            self._began = time.monotonic()  # the other end may have waited for this one
                            break
            finally:
                if link is not None:
                    link.close()
