"""Stage `compress`: replaces an operation by operations on encoded values for the later stages."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch

from mcr_plus.compression.codec import Codec, PayloadCodec
from mcr_plus.compression.copies import Copies
from mcr_plus.compression.options import LOCAL, CompressOptions, codec_of
from mcr_plus.compression.policy import (
    is_stateful,
    largest_alignment,
    options_from_call,
    refusal,
    refusal_of_any_shape,
)
from mcr_plus.compression.state import CompressorState
from mcr_plus.config.options import plain_options
from mcr_plus.core.buffers import Pool
from mcr_plus.core.kinds import SAME_RESULT
from mcr_plus.core.message import Message, Signature, frozen, thawed
from mcr_plus.core.streams import has_kernels
from mcr_plus.core.units import format_size
from mcr_plus.core.work import Work
from mcr_plus.engine.streams import stage_through_host
from mcr_plus.errors import InvalidArgument, Unsupported
from mcr_plus.kernels.compiling import preparing
from mcr_plus.pipeline.inference import outside_of_inference_mode
from mcr_plus.pipeline.stage import Context, Issue, Next, Stage
from mcr_plus.pipeline.treatment import NO_CODEC, Treatment

if TYPE_CHECKING:
    from mcr_plus.compression.schemes import Scheme

_log = logging.getLogger("mcr_plus")


class CompressStage(Stage):
    """Stage that takes the codec from the call's `compress=`, else a rule, else the stage's options.

    If the call names a codec that does not support the operation, binding raises an error. If the
    configuration names it, the operation is sent uncompressed, with a note, and a warning if a rule names it.
    """

    Options = CompressOptions

    def __init__(self, options: CompressOptions, context: Context) -> None:
        self._options = options
        self._config = context.config
        self._libraries = context.backends
        self._group = context.group
        self._one_clock = context.world.hosts_of(context.group) == 1
        self._explains = context.runtime is None
        self._warns_of = None if self._explains or context.group.rank else context.place
        self._restored: MutableMapping[str, Any] = {}  # loaded state, until an operation needs it
        self._pool = Pool()
        hosts = context.world.hosts
        here = hosts[context.world.rank]
        self._copies = Copies(f"group '{context.group.name}'", hosts.count(here))
        self._instances: dict[str, CodecInstance] = {}
        self._last: dict[tuple[str, int, int], Work] = {}  # last message by kind, peer and tag
        if context.runtime is not None:
            context.runtime.caches.append(self._forget)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that this stage keeps."""
        return self._pool.nbytes

    def state(self) -> dict[str, Any]:
        """Return the state by operation name; the loaded state for operations that were not called since."""
        state: dict[str, Any] = {}
        for name, instance in self._instances.items():
            if instance.restored:
                state[name] = instance.restored
            elif instance.known_state is not None and instance.known_state.tensors:
                state[name] = instance.known_state.tensors
        return state

    def load_state(self, kept: MutableMapping[str, Any]) -> None:
        """Restore the state of bound operations now, and of other operations when they are bound."""
        self._restored = kept
        for name, instance in self._instances.items():
            if name in kept:
                instance.restore(kept.pop(name))

    def forget_state(self, is_over: Callable[[str], bool]) -> None:
        """Free the residuals of operations that are never issued again."""
        for name in [name for name in self._restored if is_over(name)]:
            del self._restored[name]
        for name, instance in self._instances.items():
            if is_over(name):
                instance.begin_anew()

    def _forget(self) -> None:
        """Drop the codec instances without state."""
        for name in [name for name, instance in self._instances.items() if not instance.is_stateful]:
            del self._instances[name]

    def bind(self, signature: Signature, next: Next) -> Issue:
        """Bind the operations on encoded values, or the unchanged operation."""
        compress = signature.compress
        plain = signature.replace(compress=None, parts=None, key=None)
        options = self._options if compress is None else options_from_call(signature)
        if options.codec == "none":
            if compress is not None:
                next.note("off for this operation")
            return next(plain)
        if not signature.nbytes and signature.nbytes is not None:
            return next(plain)
        codec, asked = codec_of(options), compress is not None
        reason = None if signature.ranks == 1 else self._refusal(codec, options, signature)
        if reason is not None and asked:
            shown = thawed(compress) if isinstance(compress, tuple) else compress
            raise Unsupported(f"compress={shown!r} on {plain.describe()}: {reason}")
        if reason is not None:
            self._warn_of_rule(codec, options, plain)
        reason = reason or _useless(codec, options, signature, asked=asked)
        if reason is not None:
            next.note(f"codec {codec.name} not used: {reason}")
            return next(plain)
        signature = signature.replace(compress=None)
        if has_kernels(signature.device):
            return self._compressed(codec, options, signature, next)
        next.note(f"encoded on the host: codec {codec.name} has no kernels for {signature.device}")
        on_host = self._compressed(codec, options, signature.replace(device="cpu"), next)
        return on_host if self._explains else stage_through_host(signature, on_host)

    def _refusal(self, codec: Codec, options: CompressOptions, signature: Signature) -> str | None:
        """Return the reason why an operation cannot be compressed here; None if it can."""
        reason = refusal(codec, options, signature) or _named(signature)
        if reason is None and signature.is_p2p and codec.traits.keeps_received and signature.device != "cpu":
            streaming = [name for name, library in self._libraries.items() if library.on_stream]
            untagged = next((name for name in streaming if signature.backend in (None, name)), None)
            if untagged is not None:
                return (
                    f"messages of codec {codec.name} need tags, which {untagged} does not support; name "
                    "another library, such as backend='gloo'"
                )
        return reason

    def _warn_of_rule(self, codec: Codec, options: CompressOptions, signature: Signature) -> None:
        """Warn once that the rule's codec does not support an operation that the rule matches.

        Unsupported shapes do not count as a mistake: a rule for `powersgd` matches biases, too.
        """
        reason = refusal_of_any_shape(codec, options, signature) or _named(signature)
        if self._warns_of is not None and reason is not None:
            _log.warning(
                "%s: codec %s is not used for %s: %s (reported once; `mcr-plus explain` shows what the rule "
                "does to other operations)",
                self._warns_of, codec.name, signature.describe(), reason,
            )  # fmt: skip
            self._warns_of = None

    def treatment(self, signature: Signature, rest: Callable[[Signature], Treatment]) -> Treatment:
        """See `Stage.treatment`; the alignment suits every codec that the operation may get."""
        compress = signature.compress
        options = self._options if compress is None else options_from_call(signature)
        codec = None if options.codec == "none" else codec_of(options)
        keeps = codec is not None and is_stateful(codec, options)
        if signature.dtype is None or not signature.dtype.is_floating_point:
            alignment = 1
        elif compress is None:
            alignment = largest_alignment(self._config)
        else:
            alignment = 1 if codec is None else codec.traits.alignment
        why_not = None if codec is None else refusal(codec, options, signature)
        if compress is None:
            compress = self._in_a_bucket(codec, why_not, signature)
        return replace(
            rest(signature.replace(compress=None)),
            compress=compress,
            alignment=alignment,
            codec=None if codec is None else codec.name,
            refusal=why_not,
            keeps=keeps,
            forwards=codec is not None and codec.traits.keeps_received and why_not is None,
        )

    def _in_a_bucket(
        self, codec: Codec | None, refused: str | None, signature: Signature
    ) -> tuple[tuple[str, object], ...] | bool:
        """Return the `compress=` of a bucket that compresses the operation as if it were sent alone."""
        options = self._options
        if codec is None:
            return NO_CODEC
        exempt = options.exempt is not None and (signature.nbytes or 0) < options.exempt.below
        if exempt or refused is not None:
            return False
        return frozen(plain_options(options))

    def _compressed(self, codec: Codec, options: CompressOptions, full: Signature, next: Next) -> Issue:
        plain = full.replace(parts=None, key=None)
        full = full.replace(encoding=_label(options))
        instance = CodecInstance(codec, options, full, self._group.rank, self._copies)
        counts_messages = full.is_p2p and (is_stateful(codec, options) or options.warmup > 0)
        if counts_messages or full.key is not None or full.tag is not None:
            # One instance per name, shared by synchronous and asynchronous calls of an operation.
            instance = self._instances.setdefault(instance.name, instance)
            if instance.name in self._restored:
                instance.restore(self._restored.pop(instance.name))
        if not self._explains:
            prepare(codec, plain.dtype)
        full = full.replace(call=full.as_call())
        composed = self._scheme(instance, full)
        audit_every = options.audit_every if plain.kind in SAME_RESULT else None
        notes = [f"codec {codec.name}: {composed.description}"]
        from mcr_plus.compression.scheme_bytes import payload_bytes

        payload = payload_bytes(codec, full)
        if payload is not None:
            most = "" if codec.traits.fixed_rate else " at most"
            notes.append(f"{plain.nbytes} bytes become {payload}{most}")
        if options.feedback is not None:
            notes.append(options.feedback)
        if audit_every is not None:
            notes.append(f"results compared every {audit_every} calls")
        if options.never_slower and not plain.is_p2p:
            notes.append("left out while it is measured to be slower")
        if options.warmup:
            notes.append(f"from call {options.warmup + 1} on")
        next.note("; ".join(notes), lambda: {"codec": codec.name, "never_slower": options.never_slower})
        issue = composed.bind(next)
        if audit_every is not None:
            from mcr_plus.compression.audit import audited

            issue = audited(issue, audit_every, codec.name, full, self._group, next)
        if options.never_slower and not plain.is_p2p and not self._explains:
            from mcr_plus.compression.never_slower import never_slower

            raw = next(plain) if options.feedback is None else _with_residual(next(plain), instance)
            issue = never_slower(raw, issue, codec.name, plain, next, one_clock=self._one_clock)
        if options.warmup:
            issue = _after(options.warmup, next(plain), issue, instance)
        return outside_of_inference_mode(issue)

    def _scheme(self, instance: CodecInstance, full: Signature) -> Scheme:
        parts = (instance.codec, full, self._group.rank, instance.state, self._pool)
        if full.is_p2p and instance.codec.traits.keeps_received:
            from mcr_plus.compression.messages import CompressedMessages

            return CompressedMessages(*parts, named=self._group.named, last=self._last)
        from mcr_plus.compression.schemes import scheme_of  # imported here: most operations have no codec

        return scheme_of(instance.codec, full)(*parts)


class CodecInstance:
    """Codec object of an operation or bucket, with its state between calls."""

    def __init__(
        self, codec: Codec, options: CompressOptions, signature: Signature, rank: int, copies: Copies
    ) -> None:
        self.codec = codec
        self._copies = copies
        self.restored: dict[str, torch.Tensor] = {}  # loaded tensors, until the first call
        self.resumed = False
        self.calls = Counter[tuple[int | None, int]]()  # by peer and tag
        self._options = options
        self._state: CompressorState | None = None
        what = signature.replace(ranks=0, nbytes=None, backend=None, async_op=False, root_in_job=None)
        self.name = what.describe()
        self._unit = signature.ranks if signature.reduce_op == "SUM" else 1
        codec.enter(rank, self.name)

    def state(self, device: torch.device, numel: int) -> CompressorState:
        """Return the state; the first call creates it for `numel` values on `device`."""
        if self._state is None:
            self._state = self._made(device, numel)
            if self.restored:
                self._put_back(self._state)
        return self._state

    @property
    def is_stateful(self) -> bool:
        """True if later calls depend on earlier calls."""
        warming_up = self._options.warmup > 0 or self._options.feedback is not None
        if self._state is not None and self.codec.traits.keeps_received:
            return True
        return warming_up or bool(self.restored) or (self._state is not None and bool(self._state.tensors))

    @property
    def known_state(self) -> CompressorState | None:
        """State of the codec, None before the first call."""
        return self._state

    def begin_anew(self) -> None:
        """Drop the state; the next call starts from zero."""
        self._state, self.restored, self.resumed, self.calls = None, {}, False, Counter()

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the tensors of another job, now or at the first call.

        Raises `InvalidArgument` at loading if the tensors do not fit the operation.
        """
        self.restored, self.resumed = dict(tensors), True
        if self._state is not None:
            self._put_back(self._state)

    def _put_back(self, state: CompressorState) -> None:
        tensors, self.restored = self.restored, {}
        try:
            state.restore(tensors)
        except (KeyError, RuntimeError, ValueError, TypeError) as error:
            raise InvalidArgument(
                f"state: the entry kept for {self.name} does not fit it: {type(error).__name__}: {error}"
            ) from None

    def _made(self, device: torch.device, numel: int) -> CompressorState:
        from mcr_plus.compression.ef21 import Ef21
        from mcr_plus.compression.error_feedback import ErrorFeedback, MomentumCorrection

        options = self._options
        if options.error_feedback is not None:
            return ErrorFeedback(self.codec, numel, device, options.error_feedback.decay, self._unit)
        if options.momentum_correction is not None:
            momentum = options.momentum_correction.momentum
            return MomentumCorrection(self.codec, numel, device, momentum, self._unit)
        if options.ef21:
            return Ef21(self.codec, numel, device, self._unit)
        return self.codec.kept_state(self._copies) or CompressorState(self.codec)


_prepared: set[str] = set()
_MANY = 1 << 14  # number of values from which `topk` samples first


def prepare(codec: Codec, dtype: torch.dtype | None = None) -> None:
    """Compile a codec's kernels, or load them from disk, before an operation's deadline begins.

    `dtype`: dtype of the values, for codecs with kernels per dtype; None for all dtypes.
    """
    codec.prepare(dtype)
    if (key := repr(codec)) in _prepared:
        return
    _prepared.add(key)
    codec = type(codec)(codec.options)  # a new object, because encoding may change the state
    with preparing(codec.name):
        _use(codec)


def _use(codec: Codec) -> None:
    """Call every method that uses a kernel."""
    values = torch.zeros(max(600, codec.traits.alignment + 1), dtype=codec.traits.dtypes[0], device="cpu")
    if isinstance(codec, PayloadCodec):
        wire = torch.empty(3, codec.wire_numel(values.numel()), dtype=codec.wire_dtype, device="cpu")
        written = codec.encode(values, wire[0])
        codec.decode(wire[0, :written], values)
        total = torch.zeros(values.numel(), device="cpu")
        codec.decode_accumulate(wire[0, :written], total)
        if codec.traits.sparse:
            codec.clear(wire[0, :written], total)
            many = torch.zeros(_MANY, device="cpu")
            codec.encode(many, torch.empty(codec.wire_numel(_MANY), dtype=codec.wire_dtype, device="cpu"))
        if codec.traits.fixed_rate and torch.float32 in codec.traits.dtypes:
            # Several rows, as in real calls: parts of a single row would be contiguous, which is another
            # compiled type.
            wire[1] = wire[0]
            codec.reduce(wire[:2], total, wire[2], skip=-1)
            codec.sum_payloads(wire[:2], total, 0.5)
            codec.encode_rest(total.clone(), 1.0, total, wire[2])
    else:
        shapes = [(24, 25)]
        wires = [torch.zeros(each.numel, dtype=each.dtype, device="cpu") for each in codec.rounds(shapes, 1)]
        for _ in codec.exchange(values[:600], shapes, wires, 1, values[:600].clone()):
            pass


def _after(calls: int, raw: Issue, compressed: Issue, instance: CodecInstance) -> Issue:
    """Return an issue that uses `raw` for the first `calls` calls, then `compressed`."""

    def start(message: Message) -> Work:
        channel = message.peer, message.match_tag
        if instance.calls[channel] < calls and not instance.resumed:
            instance.calls[channel] += 1
            return raw(message)
        return compressed(message)

    return Issue(start)


def _with_residual(raw: Issue, instance: CodecInstance) -> Issue:
    """Return an issue of the uncompressed operation that first adds the residual of earlier calls."""

    def start(message: Message) -> Work:
        state = instance.known_state
        if state is not None and state.has_residual:
            earlier, given = message.prepare, message.inputs
            # Inputs that the operation does not overwrite must not change.
            in_place = all(tensor is out for tensor, out in zip(given, message.outputs, strict=True))
            inputs = given if in_place else tuple(map(torch.empty_like, given))

            def prepare() -> None:
                if earlier is not None:
                    earlier()
                for tensor, copy in zip(given, inputs, strict=True):
                    if copy is not tensor:
                        copy.copy_(tensor)
                    state.add_residual(copy.view(-1))

            # Create a new message, because a persistent operation issues the same message repeatedly.
            message = message.with_tensors(inputs, inputs if in_place else message.outputs, prepare=prepare)
        return raw(message)

    run_raw = raw.run

    def run(message: Message) -> None:
        if instance.known_state is not None and instance.known_state.has_residual:
            start(message).wait()
        else:
            run_raw(message)

    return Issue(start, run)


def _label(options: CompressOptions) -> str:
    """Return a label of codec, options and feedback, on which ranks must agree."""
    said = plain_options(options)
    text = json.dumps({key: said[key] for key in sorted(said) if key not in LOCAL})
    return f"{options.codec}:{blake2b(text.encode(), digest_size=3).hexdigest()}"


def _named(signature: Signature) -> str | None:
    """Return the reason why the algorithm named for an operation cannot be used; None if none is named."""
    if signature.backend is None or ":" not in signature.backend:
        return None
    return f"compression replaces it by other operations, to which {signature.backend} cannot be applied"


def _useless(codec: Codec, options: CompressOptions, signature: Signature, *, asked: bool) -> str | None:
    """Return the reason why compression does not pay off; None if it may."""
    if signature.ranks == 1:
        return "a group of one rank sends nothing"
    nbytes = signature.nbytes
    if nbytes is None or signature.dtype is None:
        return None
    if options.exempt is not None and nbytes < options.exempt.below:
        return f"{format_size(nbytes)} is exempt"
    from mcr_plus.compression.scheme_bytes import wire_bytes

    wire = wire_bytes(codec, signature)
    assert wire is not None
    raw = nbytes * (2 if signature.kind in ("all_reduce", "reduce") else 1)
    one_way = codec.traits.additive or signature.kind not in ("all_reduce", "reduce")
    if codec.traits.sparse and wire >= raw:
        return f"{signature.ranks} ranks' indices and values are more than the values themselves"
    if asked:
        return None
    if nbytes // signature.dtype.itemsize < codec.traits.min_numel:
        return f"fewer than {codec.traits.min_numel} values"
    if wire >= (nbytes if one_way else raw) and not codec.traits.keeps_received:
        return f"{format_size(wire)} would be sent instead of {format_size(nbytes if one_way else raw)}"
    return None
