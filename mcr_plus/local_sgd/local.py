"""`mcr.local`: inner steps on each rank alone, and outer steps on what the ranks have learned."""

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
    """Train a model on ranks that are joined by slow links: with inner steps alone, and outer steps together.

    Every rank calls `local.step()` instead of `inner.step()`, which raises as long as `local` exists, as does
    the step of another optimizer of the model. Every `every` steps, the ranks average how far
    their parameters have moved since the last outer step (the pseudo-gradient), and the outer optimizer makes
    one step of the outer parameters with it, alike on all ranks (DiLoCo; Douillard et al. 2023, arXiv
    2311.08105). The model continues from there; the inner optimizer keeps its state, which is not exchanged.
    So the ranks send once in `every` steps what data parallel training sends in each.

    With `fragments`, the model is cut by layers into parts of about the same size, each of which is sent at a
    step of its own; with `delay`, training goes on while a fragment is on its way, and after so many steps
    its parameters become mix × outer + (1 - mix) × their own (Streaming DiLoCo; Douillard et al. 2025, arXiv
    2501.18512, whose α is 1 - mix). The pseudo-gradient of fragment i is an asynchronous all_reduce with the
    tag `outer.i`, so that rules with `match: {tag: outer.*}` apply; `compress` is that of the call.

    Settings of other methods:

        DiLoCo          the defaults, with every=100 to 500
        SparseLoCo      outer=partial(SGD, lr=1.0), compress={"codec": "topk", "ratio": 1 / 64,
                        "error_feedback": {"decay": 0.95}}: the feedback in place of the outer momentum
                        (Sarfi et al. 2025, arXiv 2508.15706)
        PULSELoCo       gate="bf16": only what a pass in bfloat16 would see is sent, the rest waits (2026)
        Local SGD       outer=partial(SGD, lr=1.0): the mean of the parameters (Stich 2019, arXiv 1805.09767)
        PostLocalSGD    the same, with warmup=1000: gradients are averaged in each of the first steps
                        (Lin et al. 2020, arXiv 1808.07217)
        EASGD           outer=partial(SGD, lr=β), mix=α: the outer parameters move to the mean of the
                        model's, these to the outer ones (Zhang et al. 2015, arXiv 1412.6651), of which the
                        new value is taken

    Parameters and buffers are broadcast from the group's first rank. Shared parameters count once. Frozen
    ones, and those with `mcr_skip`, are left alone afterwards; so are buffers (running statistics), which
    each rank keeps for itself until `finish()`. The outer parameters are kept on the CPU in float32 (float64
    for models with float64 parameters): beside the model one copy of its parameters, what the outer
    optimizer keeps (one more for momentum), one while pseudo-gradients are in flight, and the residuals of
    error feedback and of `gate`.

    Ranks compare, with each fragment, the bits of its outer parameters and how many steps they have made.

    Args:
        model: changed in place. Neither wrapped by `mcr.wrap` nor in DDP or FSDP, which average gradients.
        inner: any optimizer with parameters of the model, such as AdamW.
        outer: a class of optimizers, or a function, that is called with the outer parameters of each
            fragment and returns their optimizer. None: SGD with a learning rate of 0.7 and Nesterov momentum
            0.9.
        every: inner steps from one outer step of a fragment to the next.
        fragments: how many; at most as many as modules with parameters, and as `every`.
        delay: inner steps from sending a pseudo-gradient to applying the mean; fewer than `every`.
        mix: above 0, up to 1, see above.
        compress: as of `mcr.all_reduce`; None for what the pipeline says.
        uneven: ranks may be of unlike speed. `every` is that of the fastest rank; the others make fewer
            steps in the same time, by measured times, and count less. Programs then loop until
            `local.rounds`, because ranks make different numbers of steps.
        weighted: ranks count by the tokens that they pass to `step`.
        warmup: in so many first steps, gradients are averaged, without compression, as with `mcr.wrap`.
        gate: "bf16" or "fp16", see PULSELoCo above.
        group: the ranks that train the model together; None is the whole job.

    Raises:
        InvalidArgument: an argument of another type or range, more fragments than layers, a codec that cannot
            carry the fragments, a model that is wrapped or sharded, or other parameters or settings on
            another rank.

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
    """The training of a model by inner and outer steps; made by `mcr.local`.

    Attributes:
        steps: inner steps of this rank, those of the warm-up included.
        rounds: completed windows of `every` steps: how often the last fragment has been sent.
        fragments: in the order in which they are sent; each has `anchor`, its outer parameters (flat, on the
            CPU), and `optimizer`, the outer one, whose learning rate may be changed.
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
        self.position = 0  # inner steps in the present window
        self.every = self._next_every = settings.every  # of this rank
        self.pace = 0  # nanoseconds per inner step in the last window; 0: unknown
        self._needs_closure = arguments.needs_closure(inner)
        self._references: dict[int, float] = {}  # fragment → tokens that count as 1
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
        """Make a step of the inner optimizer, and what is due of outer steps.

        All ranks call it as often, or with `uneven` until `rounds` is what it should be. It waits for other
        ranks only where a fragment is due that has not arrived.

        Args:
            tokens: from how many this rank has learned in the step; with `weighted` ranks count by these.
            closure: for `inner.step`, as LBFGS needs it; not in the warm-up.
            scaler: makes the step, in place of `scaler.step(inner)`; `scaler.update()` follows as usual. A
                step that it leaves out counts as one, so that ranks whose gradients are finite go on. In the
                warm-up it must be the same on all ranks, and gradients not unscaled yet, as with DDP.

        Returns:
            What `inner.step` returns, such as the loss of the closure.

        Raises:
            InvalidArgument: an argument is missing, of another type, or goes with no other; or parameters of
                one rank have been frozen, unfrozen, resized or wrapped since: on all ranks where the next
                fragment is due.
            PeerLost: a rank is lost. The step of the inner optimizer has been made, if `steps` has grown (in
                the warm-up it may not have), and nothing of the model is lost; see `resume`.
            OrderMismatch: ranks have made different numbers of steps.
            ResultMismatch: outer parameters differ between ranks: an outer optimizer, library or codec gives
                them different results.
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
        """Set the outer parameters to the model's in the warm-up, in which they do not follow by themselves.

        `last`: only after its last step, while `steps` does not count it yet.
        """
        left = self.settings.warmup - self.steps
        if left == 1 or (left > 1 and not last):
            for fragment in self.fragments:
                fragment.take_parameters()

    def _proceed(self, counted: int) -> None:
        """Send the fragments that are due, and apply those that have to arrive."""
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
                if fragment.flight is not None:  # the window has become shorter than the delay
                    self._land(fragment, self.settings.mix)
                self._send(fragment, self.settings.delay)
                flying = True
                if not self.settings.delay:
                    self._land(fragment, self.settings.mix)
        if self.position >= self.every:
            self.position, self.every = 0, self._next_every
            self.rounds += 1
        if flying:
            self.comm.progress()  # of codecs and libraries that advance only when they are called

    def finish(self, *, exact: bool = False) -> None:
        """End with equal models: what has not been sent yet is averaged, and no outer optimizer moves it.

        A part of a window would be moved as far by momentum as a whole one. Pseudo-gradients are sent as
        always, with codec and error feedback, so models end with the outer parameters, which lack what one
        round of the codec leaves for the next. What `gate` holds back is sent, too.

        Collective, at the same step on all ranks, or with `uneven` after the same `rounds`. Buffers of
        floating point become their means over ranks, others those of the first rank. Training may go on
        afterwards, with a new window.

        Args:
            exact: end with the mean of the ranks' parameters as they are, which are sent in float32 without
                codec: as many bytes as the parts of the model that have not just been sent.
        """
        if not isinstance(exact, bool):
            raise InvalidArgument(f"exact: expected True or False, got {exact!r}")
        if self.comm.state.revoked:
            self.resume()
        self.catch_up()
        for fragment in self.fragments:
            if fragment.flight is not None:
                self._land(fragment, self.settings.mix)
        # After a loss ranks may have dropped fragments at different steps.
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
        """Go on in the world that has taken the place of this one; collective, at the next `step()` at last.

        After `mcr.shrink`, `mcr.reconfigure` or a step of `mcr.elastic`. A fragment counts only where it has
        arrived on all ranks: one that was in flight when a rank was lost is dropped otherwise, and the steps
        since are in the next pseudo-gradient. Outer parameters, and the outer optimizer's state, become those
        of the rank with the most outer steps. A process that is new makes its `mcr.local` before it joins,
        and begins with the outer parameters. Ranks go on with the number of steps of the one that has most.
        """
        resume(self)

    def forget_weights(self) -> None:
        """Let all ranks find anew by what tokens count: those that are new have no earlier ones."""
        self._references.clear()

    def take_number(self, number: int) -> None:
        """Set the tags of the fragments by the number that this one has in its group, 0 for the first."""
        self.number = number
        consistency.keep_number(self, number)
        for fragment in self.fragments:
            fragment.tag = f"outer.{number}.{fragment.index}" if number else f"outer.{fragment.index}"

    def begin_window(self, every: int) -> None:
        """Begin a window of so many steps of this rank."""
        self.position, self._in_window = 0, 0.0
        self.every = self._next_every = every

    # -- sending and applying ---------------------------------------------------------------------

    def _send(self, fragment: Fragment, delay: int, last: Literal["coded", "exact"] | None = None) -> None:
        """Start the average of a fragment's pseudo-gradient; `last`: see `finish`."""
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
        if refusal is not None:  # the others wait for something, before all raise
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
        """Wait for a fragment in flight; returns the mean. If that fails, its steps have not been sent."""
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
        """At the end of training."""
        buffers = [each for each in self.model.buffers() if not getattr(each, "mcr_skip", False)]
        for buffer in buffers:
            if buffer.dtype in FLOATS and buffer.numel():  # float8 has no sums
                self.comm.all_reduce(buffer, "AVG", compress=False, tag=CHECK)
        broadcast_tensors([each for each in buffers if each.dtype not in FLOATS], self.comm)

    def _average_gradients(self) -> None:
        """As in data parallel training, before a step of the warm-up; None stays where all ranks have it."""
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
        """The state of outer steps, at any step; local, and complete together with those of model and inner.

        Outer parameters and their optimizer's state, counters, the residual of `gate`, and of each fragment
        in flight the mean, for which it waits. Tensors are not copied. All but counters with `uneven` and
        the residual is equal on all ranks. So where each rank saves this, `model.state_dict()` and
        `inner.state_dict()`, as many ranks go on as if nothing had happened; of other numbers each loads
        those of one rank, and what the others have learned since their last outer step is lost. Residuals
        of error feedback are in `mcr.state_dict()`.
        """
        state = saved(self)
        self._left = time.perf_counter()  # waiting for fragments is no computing
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; after the state of the model, which it leaves as it is.

        Raises:
            InvalidArgument: it is something else, or of other fragments; or of another `every` while it is
                in the middle of a window.
        """
        restore(self, state)

    def stats(self) -> dict[str, float]:
        """Figures of this rank so far.

        `steps`, `rounds`; `bytes` of pseudo-gradients and `wire_bytes` as handed to libraries
        (`Work.info`); seconds `computing` (outside of `step`, and in the inner optimizer), `waiting` for
        other ranks, and in `outer` steps; `utilization`: the share of computing.
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
