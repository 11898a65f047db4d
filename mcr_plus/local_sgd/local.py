"""Inner steps on each rank alone, and outer steps on the mean progress of the ranks (`mcr.local`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import torch

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.communicator.transfer import broadcast_tensors
from mcr_plus.core.kinds import FLOATS
from mcr_plus.core.units import whole_number
from mcr_plus.errors import InvalidArgument
from mcr_plus.job.init import member_of
from mcr_plus.local_sgd import arguments, consistency
from mcr_plus.local_sgd.consistency import CHECK
from mcr_plus.local_sgd.fragments import Fragment, Outer, OuterUpdate, digest
from mcr_plus.local_sgd.restore import resume
from mcr_plus.local_sgd.saving import restore, saved
from mcr_plus.training.parameters import compare

WARMUP: Final = "local.warmup"


def local(
    model: torch.nn.Module,
    inner: torch.optim.Optimizer,
    outer: Outer | None = None,
    every: int = 30,
    fragments: int = 1,
    delay: int = 0,
    mix: float = 1.0,
    compress: Any = None,
    *,
    uneven: bool = False,
    weighted: bool = False,
    warmup: int = 0,
    gate: str | None = None,
    group: Communicator | None = None,
) -> LocalSteps:
    """Train over slow links: each rank makes inner steps alone, and all ranks make outer steps together.

    Every rank calls `local.step()` instead of `inner.step()`. While `local` exists, `inner.step()` and steps
    of other optimizers of the model raise. Every `every` steps, the ranks average the change of their
    parameters since the last outer step (the pseudo-gradient). With the mean, the outer optimizer makes one
    step of the outer parameters, equal on all ranks (DiLoCo; Douillard et al. 2023, arXiv 2311.08105). The
    model continues from there; the inner optimizer keeps its state, which is not exchanged. So ranks send in
    `every` steps as much as data parallel training sends in each step.

    With `fragments`, the model is divided by layers into parts of similar size, which are sent at different
    steps. With `delay`, training continues during the transfer of a fragment; after `delay` steps its
    parameters become mix × outer + (1 - mix) × model (Streaming DiLoCo; Douillard et al. 2025, arXiv
    2501.18512, where α is 1 - mix). The pseudo-gradient of fragment i is an asynchronous all_reduce with the
    tag `outer.i`, so rules with `match: {tag: outer.*}` apply; `compress` is an option of this call.

    Settings of other methods:

        DiLoCo          the defaults, with every=100 to 500
        SparseLoCo      outer=partial(SGD, lr=1.0), compress={"codec": "topk", "ratio": 1 / 64,
                        "error_feedback": {"decay": 0.95}}: the feedback replaces the outer momentum
                        (Sarfi et al. 2025, arXiv 2508.15706)
        PULSELoCo       gate="bf16": only changes visible to a pass in bfloat16 are sent at once (2026)
        Local SGD       outer=partial(SGD, lr=1.0): the mean of the parameters (Stich 2019, arXiv 1805.09767)
        PostLocalSGD    the same, with warmup=1000: gradients are averaged in each of the first steps
                        (Lin et al. 2020, arXiv 1808.07217)
        EASGD           outer=partial(SGD, lr=β), mix=α: outer parameters move toward the mean of the models,
                        and the models toward the new outer parameters (Zhang et al. 2015, arXiv
                        1412.6651)

    Parameters and buffers are broadcast from the group's first rank. Shared parameters count once. Frozen
    parameters and those with `mcr_skip` stay local afterwards; so do buffers (running statistics), until
    `finish()`. The outer parameters are kept on the CPU in float32 (float64
    for models with float64 parameters). Memory beside the model: one copy of its parameters, the state of the
    outer optimizer (one more for momentum), one copy while pseudo-gradients are in flight, and the residuals
    of error feedback and of `gate`.

    With each fragment, ranks compare the bits of its outer parameters and their numbers of steps.

    Args:
        model: changed in place. Must not be wrapped by `mcr.wrap`, DDP or FSDP, which average gradients.
        inner: any optimizer with parameters of the model, such as AdamW.
        outer: a class of optimizers, or a function; called with the outer parameters of each
            fragment, it returns their optimizer. None: SGD with a learning rate of 0.7 and Nesterov momentum
            0.9.
        every: number of inner steps between two outer steps of a fragment.
        fragments: number of fragments; at most the number of modules with parameters, and at most `every`.
        delay: inner steps from sending a pseudo-gradient to applying the mean; less than `every`.
        mix: above 0, up to 1, see above.
        compress: as in `mcr.all_reduce`; None: the pipeline decides.
        uneven: ranks may differ in speed. `every` then counts steps of the fastest rank; other ranks make
            fewer steps in the same (measured) time, and have less weight. Programs then loop until
            `local.rounds`, because ranks make different numbers of steps.
        weighted: weight ranks by the tokens that they pass to `step`.
        warmup: number of first steps that average gradients, without compression, as with `mcr.wrap`.
        gate: "bf16" or "fp16", see PULSELoCo above.
        group: the ranks that train the model together; None is the whole job.

    Raises:
        InvalidArgument: an argument has a wrong type or range, there are more fragments than layers, a codec
            does not support the fragments, the model is wrapped or sharded, or ranks have different settings.

    Example:
        ```python
        model = torch.nn.Linear(4, 2)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        local = mcr.local(model, inner, every=5, compress="int8_block")
        for _ in range(10):
            inner.zero_grad()
            model(torch.full((3, 4), float(mcr.get_rank()))).square().sum().backward()
            local.step()
        local.finish()  # the parameters are equal on all ranks
        ```
    """
    comm = member_of(group)
    for name, value, kind in (("model", model, torch.nn.Module), ("inner", inner, torch.optim.Optimizer)):
        if not isinstance(value, kind):
            raise InvalidArgument(f"{name}: expected a torch {kind.__name__}, got {type(value).__name__}")
    settings = arguments.checked(every, fragments, delay, mix, compress, uneven, weighted, warmup, gate)
    return LocalSteps(model, inner, outer, settings, comm)


class LocalSteps:
    """Trains a model by inner and outer steps; the result of `mcr.local`.

    Attributes:
        steps: inner steps of this rank, including the warm-up.
        rounds: number of completed windows of `every` steps.
        fragments: in the order of sending; each has `anchor` (flat outer parameters on the CPU) and
            `optimizer` (the outer optimizer; its learning rate may be changed).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer,
        outer: Any,
        settings: arguments.Settings,
        comm: Communicator,
    ) -> None:
        self.model, self.inner, self.settings, self.comm = model, inner, settings, comm
        consistency.refuse_wrapped(model)
        self.named = arguments.trained(model, inner)
        self.fragments = arguments.fragments_of(self.named, settings, outer)
        arguments.check_compression(settings.compress, self.fragments, comm)
        compare(comm, self.named)
        self.take_number(consistency.agree(self))
        both = [*model.parameters(), *model.buffers()]
        broadcast_tensors([each for each in both if not getattr(each, "mcr_skip", False)], comm)
        for fragment in self.fragments:
            fragment.take_parameters()
        self.steps = self.rounds = 0
        self.position = 0  # inner steps in the current window
        self.every = self._next_every = settings.every  # steps of this rank per window
        self.pace = 0  # nanoseconds per inner step in the last window; 0: unknown
        self._needs_closure = arguments.needs_closure(inner)
        self._references: dict[int, float] = {}  # fragment → tokens with weight 1
        self._computing = self._in_window = self._waiting = self._outer = 0.0
        self._bytes = self._wire_bytes = 0
        self._left = time.perf_counter()
        arguments.refuse_other_steps(self)

    # -- steps ------------------------------------------------------------------------------------

    def step(
        self,
        tokens: int | None = None,
        *,
        closure: Callable[[], Any] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        """Make a step of the inner optimizer, and the outer steps that are due.

        All ranks make the same number of calls; with `uneven` they call it until `rounds` is reached. The
        call waits for other ranks only if a due fragment has not arrived.

        Args:
            tokens: number of tokens in this rank's step; the weight of the rank with `weighted`.
            closure: closure for `inner.step`, as LBFGS needs; not in the warm-up.
            scaler: the step is made like `scaler.step(inner)`; call `scaler.update()` afterwards as usual. A
                skipped step counts, so that ranks with finite gradients continue. In the warm-up, as with
                DDP, the scale must be equal on all ranks, and gradients must not be unscaled before.

        Returns:
            The result of `inner.step`, such as the loss of the closure.

        Raises:
            InvalidArgument: an argument is missing, has a wrong type, or cannot be combined with another; or
                parameters of one rank were frozen, unfrozen, resized or wrapped since: raised on all ranks
                when the next fragment is due.
            PeerLost: a rank is lost. If `steps` has grown, the inner optimizer has made its step (not
                necessarily in the warm-up). The model is intact; see `resume`.
            OrderMismatch: ranks have made different numbers of steps.
            ResultMismatch: outer parameters differ between ranks: an outer optimizer, library or codec
                computed different results.
        """
        counted = self._counted(tokens)
        if closure is not None or scaler is not None or self._needs_closure:
            arguments.check_call(self.inner, closure, scaler, warmup=self.steps < self.settings.warmup)
        if self.comm.state.revoked:
            self.resume()
        if self.steps < self.settings.warmup:
            began = time.perf_counter()
            self._average_gradients()
            self._waiting += time.perf_counter() - began
            self._left += time.perf_counter() - began
        with arguments.stepping(self.inner):
            if scaler is not None:
                returned = scaler.step(self.inner)
            else:
                returned = self.inner.step() if closure is None else self.inner.step(closure)
        entered = time.perf_counter()
        self._computing += entered - self._left
        self._in_window += entered - self._left
        waited = self._waiting
        self.catch_up(last=True)
        self.steps += 1
        if self.steps <= self.settings.warmup:
            for fragment in self.fragments:
                fragment.rounds += 1
            self._in_window = 0.0
        else:
            self._proceed(counted)
        self._left = time.perf_counter()
        self._outer += self._left - entered - (self._waiting - waited)
        return returned

    def catch_up(self, *, last: bool = False) -> None:
        """Copy the model's parameters to the outer parameters, which are not updated during the warm-up.

        `last`: only at the end of the warm-up, before `steps` counts the last step.
        """
        left = self.settings.warmup - self.steps
        if left == 1 or (left > 1 and not last):
            for fragment in self.fragments:
                fragment.take_parameters()

    def _proceed(self, counted: int) -> None:
        """Send the fragments that are due, and apply fragments after their delay."""
        self.position += 1
        flying = False
        for fragment in self.fragments:
            fragment.tokens += counted
            if fragment.flight is not None and fragment.flight.due <= self.steps:
                self._land(fragment, self.settings.mix)
            flying = flying or fragment.flight is not None
        count = len(self.fragments)
        for index, fragment in enumerate(self.fragments):
            if self.position == (index + 1) * self.every // count:
                if fragment.flight is not None:  # the window is now shorter than the delay
                    self._land(fragment, self.settings.mix)
                self._send(fragment, self.settings.delay)
                flying = True
                if not self.settings.delay:
                    self._land(fragment, self.settings.mix)
        if self.position >= self.every:
            self.position, self.every = 0, self._next_every
            self.rounds += 1
        if flying:
            self.comm.progress()  # some codecs and libraries advance only when called

    def finish(self, *, exact: bool = False) -> None:
        """End training with equal models: average all unsent changes, without the outer optimizers.

        Momentum would move the parameters by a whole window even after a part of it. Pseudo-gradients are
        sent as usual, with codec and error feedback, so the models become the outer parameters, without
        residuals that the codec would have sent later. The residual of `gate` is sent, too.

        Collective, at the same step on all ranks, or with `uneven` after the same `rounds`. Floating-point
        buffers become their means over ranks; other buffers are copied from the first rank. Training may
        continue afterwards, with a new window.

        Args:
            exact: end with the exact mean of the ranks' parameters, sent in float32 without a codec. All
                fragments are sent, except fragments that have just been sent.
        """
        if not isinstance(exact, bool):
            raise InvalidArgument(f"exact: expected True or False, got {exact!r}")
        if self.comm.state.revoked:
            self.resume()
        self.catch_up()
        for fragment in self.fragments:
            if fragment.flight is not None:
                self._land(fragment, self.settings.mix)
        # After a loss, ranks may have dropped fragments at different steps.
        moved = self.comm.all_gather_object([bool(each.tokens) for each in self.fragments], tag=CHECK)
        for index, fragment in enumerate(self.fragments):
            if any(each[index] for each in moved):
                self._send(fragment, 0, last="exact" if exact else "coded")
        for fragment in self.fragments:
            if fragment.flight is not None:
                mean = self.arrived(fragment)
                fragment.flight = None
                fragment.settle(mean)
            else:
                fragment.draw(1.0)
        if self.position:
            self.position, self.every = 0, self._next_every
            self.rounds += 1
        self._average_buffers()
        digests = self.comm.all_gather_object([digest(each.anchor) for each in self.fragments], tag=CHECK)
        for index, fragment in enumerate(self.fragments):
            consistency.compare_digests(self, fragment, [each[index] for each in digests])
        self._left = time.perf_counter()

    def resume(self) -> None:
        """Continue in the world that has replaced this one; collective. The next `step()` does this, too.

        Called after `mcr.shrink`, `mcr.reconfigure` or a step of `mcr.elastic`. A fragment in flight counts
        only if it has arrived on all ranks. Otherwise it is dropped, and its steps become part of the next
        pseudo-gradient. Outer parameters and the outer optimizer's state are copied from the rank with the
        most outer steps. A new process calls `mcr.local` before it joins, and starts with the outer
        parameters. All ranks continue from the largest number of steps.
        """
        resume(self)

    def forget_weights(self) -> None:
        """Let all ranks choose new token weights, because new ranks have no weights."""
        self._references.clear()

    def take_number(self, number: int) -> None:
        """Set the tags of the fragments from the number of this object in its group, 0 for the first."""
        self.number = number
        consistency.keep_number(self, number)
        for fragment in self.fragments:
            fragment.tag = f"outer.{number}.{fragment.index}" if number else f"outer.{fragment.index}"

    def begin_window(self, every: int) -> None:
        """Begin a window with `every` steps of this rank."""
        self.position, self._in_window = 0, 0.0
        self.every = self._next_every = every

    # -- sending and applying ---------------------------------------------------------------------

    def _send(self, fragment: Fragment, delay: int, last: Literal["coded", "exact"] | None = None) -> None:
        """Start averaging a fragment's pseudo-gradient; `last`: see `finish`."""
        comm, settings = self.comm, self.settings
        refusal = consistency.changes(self)
        pace = int(1e9 * self._in_window / max(1, self.position))
        own = [digest(fragment.anchor), self.steps, int(fragment.tokens), pace, refusal is not None]
        table = torch.empty(comm.size, len(own), dtype=torch.int64, device="cpu")
        check = comm.all_gather_into_tensor(
            table, torch.tensor([own], device="cpu"), async_op=True, compress=False, tag=CHECK
        )
        assert check is not None
        weight = None
        if refusal is not None:  # send zeros, for which other ranks wait before all raise
            flat = torch.zeros_like(fragment.anchor)
        elif last == "coded":
            flat = fragment.all_of_it()
        else:
            flat = fragment.pseudo_gradient(None if last else settings.gate)
        if settings.weighted:
            if fragment.index not in self._references:
                self._wait(check.wait)
                self._references[fragment.index] = float(table[:, consistency.TOKENS].double().mean())
            weight = self._references[fragment.index]
            flat.mul_(fragment.tokens / weight)
        compress = False if last == "exact" else settings.compress
        options: dict[str, Any] = {"tag": fragment.tag, "compress": compress}
        work = comm.send_bucket(flat, "AVG", members=len(fragment.named), **options)
        due = self.steps + delay
        fragment.flight = OuterUpdate(due, flat, fragment.tokens, work, (check, table), weight, refusal)
        fragment.tokens = 0.0
        if fragment is self.fragments[-1]:
            self._in_window, self.pace = 0.0, pace

    def arrived(self, fragment: Fragment) -> torch.Tensor:
        """Wait for a fragment in flight, and return the mean. After an error, its steps count as unsent."""
        flight = fragment.flight
        assert flight is not None
        try:
            if flight.check is not None:
                check, table = flight.check
                self._wait(check.wait)
                flight.check = None
                consistency.compare_table(self, fragment, table, flight.refusal)
                if self.settings.uneven and fragment is self.fragments[-1]:
                    times = table[:, consistency.NANOSECONDS].clamp(min=1).tolist()
                    self._next_every = consistency.share_of(self, times[self.comm.rank], times)
                mean = float(table[:, consistency.TOKENS].double().mean())
                if flight.weight is not None and flight.work is not None:
                    self._wait(flight.work.wait)
                    flight.values.mul_(flight.weight / mean)
                    self._references[fragment.index] = mean
            if flight.work is not None:
                self._wait(flight.work.wait)
                self._bytes += flight.work.info.bytes
                self._wire_bytes += flight.work.info.wire_bytes
                flight.work = None
        except BaseException:
            fragment.drop()
            raise
        return flight.values

    def _land(self, fragment: Fragment, mix: float) -> None:
        mean = self.arrived(fragment)
        fragment.flight = None
        fragment.apply(mean, mix)

    def _wait(self, wait: Callable[[], None]) -> None:
        began = time.perf_counter()
        wait()
        self._waiting += time.perf_counter() - began

    def _average_buffers(self) -> None:
        """Average the buffers at the end of training."""
        buffers = [each for each in self.model.buffers() if not getattr(each, "mcr_skip", False)]
        for buffer in buffers:
            if buffer.dtype in FLOATS and buffer.numel():  # float8 has no sums
                self.comm.all_reduce(buffer, "AVG", compress=False, tag=CHECK)
        broadcast_tensors([each for each in buffers if each.dtype not in FLOATS], self.comm)

    def _average_gradients(self) -> None:
        """Average gradients before a step of the warm-up; a gradient that is None on all ranks stays None."""
        for fragment in self.fragments:
            params = [param for _, param in fragment.named]
            numel = fragment.anchor.numel()
            flat = torch.zeros(numel + len(params), dtype=fragment.anchor.dtype, device="cpu")
            begin = 0
            for index, param in enumerate(params):
                if param.grad is not None:
                    flat[begin : begin + param.numel()].copy_(param.grad.reshape(-1))
                    flat[numel + index] = 1
                begin += param.numel()
            self.comm.all_reduce(flat, "AVG", compress=False, tag=WARMUP)
            begin = 0
            for index, param in enumerate(params):
                if flat[numel + index]:
                    mean = flat[begin : begin + param.numel()].view(param.shape)
                    param.grad = mean.to(param.device, param.dtype, copy=True)
                begin += param.numel()

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of outer steps, at any step; local. Save it with the states of model and inner.

        It contains outer parameters, the outer optimizer's state, counters, the residual of `gate`, and the
        mean of each fragment in flight, for which the call waits. Tensors are not copied. States are equal on
        all ranks, except for the residual and, with `uneven`, counters. If each rank saves this state,
        `model.state_dict()` and `inner.state_dict()`, the same number of ranks can continue seamlessly.
        Another number of ranks loads the states of one rank; the progress of other ranks since their last
        outer step is lost. Residuals of error feedback are in `mcr.state_dict()`.
        """
        state = saved(self)
        self._left = time.perf_counter()  # do not count the wait for fragments as computing
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, after the model's state, which stays unchanged.

        Raises:
            InvalidArgument: the state is invalid, or has other fragments; or another `every` within a window.
        """
        restore(self, state)

    def stats(self) -> dict[str, float]:
        """Return figures of this rank so far.

        `steps`, `rounds`; `bytes` of pseudo-gradients, and `wire_bytes` as passed to libraries (`Work.info`);
        seconds `computing` (outside of `step`, and in the inner optimizer), `waiting` for other ranks, and in
        `outer` steps; `utilization`: fraction of the total time spent computing.
        """
        total = self._computing + self._waiting + self._outer
        return {
            "steps": self.steps,
            "rounds": self.rounds,
            "bytes": self._bytes,
            "wire_bytes": self._wire_bytes,
            "computing": self._computing,
            "waiting": self._waiting,
            "outer": self._outer,
            "utilization": self._computing / total if total else 0.0,
        }

    def __repr__(self) -> str:
        return (
            f"<LocalSteps of {len(self.fragments)} fragments, every {self.every} steps: {self.steps} steps, "
            f"{self.rounds} rounds>"
        )

    # -- checks -----------------------------------------------------------------------------------

    def _counted(self, tokens: int | None) -> int:
        if tokens is None:
            if self.settings.weighted and not self.settings.uneven:
                raise InvalidArgument("tokens: weighted=True needs the tokens of each step, got None")
            return 1
        if callable(tokens):
            raise InvalidArgument("tokens: expected a number from 1, got a function; pass closure=…")
        if (number := whole_number(tokens)) is None or number < 1:
            raise InvalidArgument(f"tokens: expected a number from 1, got {tokens!r}")
        return number
