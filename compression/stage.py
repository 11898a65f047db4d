"""compress: rewrites an operation into operations on encoded values, which flow on like any other."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import blake2b

import torch

from mcr_plus.compression.audit import audited
from mcr_plus.compression.choice import asked_for, refusal
from mcr_plus.compression.codec import Codec, PayloadCodec
from mcr_plus.compression.compose import composition, payload_bytes, wire_bytes
from mcr_plus.compression.ef21 import Ef21
from mcr_plus.compression.error_feedback import ErrorFeedback, MomentumCorrection
from mcr_plus.compression.memory import Memory
from mcr_plus.compression.never_slower import never_slower
from mcr_plus.compression.pool import Pool
from mcr_plus.config import CompressOptions, codec_of, plain_options
from mcr_plus.dispatch.work import Work
from mcr_plus.errors import InvalidArgument, Unsupported
from mcr_plus.interfaces import Context, Issue, Next
from mcr_plus.kernels.compiling import preparing
from mcr_plus.message import Message, Signature, thawed
from mcr_plus.units import format_size

_SAME_EVERYWHERE = ("all_reduce", "all_gather", "broadcast")  # kinds after which ranks hold equal tensors
_LOCAL = ("never_slower", "audit_every", "warmup", "exempt")  # options that do not change what travels


class CompressStage:
    """Chooses a codec by, in this order: the call's `compress=`, a rule, the stage's own option.

    A codec asked for by the call that cannot take the operation is an error; one that comes from the
    configuration leaves such operations as they are, and says so.
    """

    def __init__(self, options: CompressOptions, context: Context) -> None:
        self._options = options
        self._group = context.group
        self._explains = context.runtime is None
        self._restored = {} if context.runtime is None else context.runtime.restored
        self._pool = Pool()
        self._owners: dict[str, Owner] = {}
        if context.runtime is not None:
            context.runtime.caches.append(self._forget)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that this stage keeps."""
        return self._pool.nbytes

    @property
    def owners(self) -> Mapping[str, Owner]:
        """Who keeps something between calls, by names that are the same on all ranks and in the next job."""
        return self._owners

    def _forget(self) -> None:
        """Let go of those who keep nothing."""
        for name in [name for name, owner in self._owners.items() if not owner.keeps]:
            del self._owners[name]

    def bind(self, signature: Signature, next: Next) -> Issue:
        """Bind to the operations on encoded values, or to the operation itself."""
        wanted = signature.compress
        plain = signature.replace(compress=None, parts=None, key=None)
        options = self._options if wanted is None else asked_for(signature)
        if options.codec == "none":
            if wanted is not None:
                next.note("off for this operation")
            return next(plain)
        if not signature.nbytes and signature.nbytes is not None:
            return next(plain)
        codec, asked = codec_of(options), wanted is not None
        reason = None if signature.ranks == 1 else refusal(codec, options, signature) or _named(signature)
        if reason is not None and asked:
            shown = thawed(wanted) if isinstance(wanted, tuple) else wanted
            raise Unsupported(f"compress={shown!r} on {plain.describe()}: {reason}")
        reason = reason or _useless(codec, options, signature, asked=asked)
        if reason is not None:
            next.note(f"codec {codec.name} not used: {reason}")
            return next(plain)
        return self._compressed(codec, options, signature.replace(compress=None), next)

    def _compressed(self, codec: Codec, options: CompressOptions, full: Signature, next: Next) -> Issue:
        plain = full.replace(parts=None, key=None)
        full = full.replace(encoding=_label(options))
        owner = Owner(codec, options, full, self._group.rank)
        if full.key is not None or full.tag is not None:
            # The ways of one operation, such as async or not, share what is kept.
            owner = self._owners.setdefault(owner.name, owner)
            if owner.name in self._restored:
                owner.restore(self._restored.pop(owner.name))
        if not self._explains:
            prepare(codec)
        full = full.replace(call=full.as_call())
        chosen = composition(owner.codec, full)
        composed = chosen(owner.codec, full, self._group.rank, owner.memory, self._pool)
        audit_every = options.audit_every if plain.kind in _SAME_EVERYWHERE else None
        says = [f"codec {codec.name}: {composed.says}"]
        payload = payload_bytes(codec, full)
        if payload is not None:
            most = "" if codec.traits.fixed_rate else " at most"
            says.append(f"{plain.nbytes} bytes become {payload}{most}")
        if options.feedback is not None:
            says.append(options.feedback)
        if audit_every is not None:
            says.append(f"results compared every {audit_every} calls")
        if options.never_slower and not plain.is_p2p:
            says.append("left out where it is measured to be slower")
        if options.warmup:
            says.append(f"from call {options.warmup + 1} on")
        next.note("; ".join(says))
        issue = composed.bind(next)
        if audit_every is not None:
            issue = audited(issue, audit_every, codec.name, full, next)
        if options.never_slower and not plain.is_p2p and not self._explains:
            raw = next(plain) if options.feedback is None else _settled(next(plain), owner)
            issue = never_slower(raw, issue, codec.name, plain, next)
        if options.warmup:
            issue = _after(options.warmup, next(plain), issue, owner)
        return issue


class Owner:
    """A codec object, and what is kept between calls of the operation it is for."""

    def __init__(self, codec: Codec, options: CompressOptions, signature: Signature, rank: int) -> None:
        self.codec = codec
        self.restored: dict[str, torch.Tensor] = {}  # until the first call asks for it
        self.resumed = False
        self.calls = 0
        self._options = options
        self._memory: Memory | None = None
        what = signature.replace(ranks=0, nbytes=None, backend=None, async_op=False)
        self.name = what.describe()
        self._unit = signature.ranks if signature.reduce_op == "SUM" else 1
        codec.enter(rank, self.name)

    def memory(self, device: torch.device, numel: int) -> Memory:
        """What lies between the operation's values and the codec."""
        if self._memory is None:
            self._memory = self._made(device, numel)
            if self.restored:
                self._put_back(self._memory)
        return self._memory

    @property
    def keeps(self) -> bool:
        """Whether later calls depend on what is here."""
        warming_up = self._options.warmup > 0
        return warming_up or bool(self.restored) or (self._memory is not None and bool(self._memory.kept))

    @property
    def known(self) -> Memory | None:
        """The memory, if there has been a call."""
        return self._memory

    def restore(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Take what another job has kept, now or at the first call."""
        self.restored, self.resumed = dict(kept), True
        if self._memory is not None:
            self._put_back(self._memory)

    def _put_back(self, memory: Memory) -> None:
        kept, self.restored = self.restored, {}
        try:
            memory.restore(kept)
        except (KeyError, RuntimeError, ValueError, TypeError) as error:
            raise InvalidArgument(
                f"state: what was kept for {self.name} does not fit it: {type(error).__name__}: {error}"
            ) from None

    def _made(self, device: torch.device, numel: int) -> Memory:
        options = self._options
        if options.error_feedback is not None:
            return ErrorFeedback(self.codec, numel, device, options.error_feedback.decay, self._unit)
        if options.momentum_correction is not None:
            momentum = options.momentum_correction.momentum
            return MomentumCorrection(self.codec, numel, device, momentum, self._unit)
        return Ef21(self.codec, numel, device, self._unit) if options.ef21 else Memory(self.codec)


_prepared: set[str] = set()


def prepare(codec: Codec) -> None:
    """Have a codec's kernels compiled, or loaded from disk, before an operation's deadline runs."""
    if (key := repr(codec)) in _prepared:
        return
    _prepared.add(key)
    codec = type(codec)(codec.options)  # another one, since encoding may change what it keeps
    with preparing(codec.name):
        _use(codec)


def _use(codec: Codec) -> None:
    """Call everything that has a kernel."""
    values = torch.zeros(max(600, codec.traits.alignment + 1), dtype=codec.traits.dtypes[0])
    if isinstance(codec, PayloadCodec):
        wire = torch.empty(2, codec.wire_numel(values.numel()), dtype=codec.wire_dtype)
        written = codec.encode(values, wire[0])
        codec.decode(wire[0, :written], values)
        total = torch.zeros(values.numel())
        codec.decode_accumulate(wire[0, :written], total)
        if codec.traits.fixed_rate and torch.float32 in codec.traits.dtypes:
            codec.reduce(wire[:1], total, wire[1], skip=-1)
    else:
        shapes = [(24, 25)]
        wires = [torch.zeros(each.numel, dtype=each.dtype) for each in codec.rounds(shapes, 1)]
        for _ in codec.exchange(values[:600], shapes, wires, 1, values[:600].clone()):
            pass


def _after(calls: int, raw: Issue, compressed: Issue, owner: Owner) -> Issue:
    """The first `calls` calls go one way, the others another."""

    def issue(message: Message) -> Work:
        if owner.calls < calls and not owner.resumed:
            owner.calls += 1
            return raw(message)
        return compressed(message)

    return issue


def _settled(raw: Issue, owner: Owner) -> Issue:
    """An uncompressed operation, whose values take along what earlier calls have left."""

    def issue(message: Message) -> Work:
        memory = owner.known
        if memory is not None and memory.holds:
            earlier, given = message.prepare, message.inputs
            # What is not overwritten by the operation anyway stays as it is.
            in_place = all(tensor is out for tensor, out in zip(given, message.outputs, strict=True))
            inputs = given if in_place else tuple(map(torch.empty_like, given))

            def prepare() -> None:
                if earlier is not None:
                    earlier()
                for tensor, copy in zip(given, inputs, strict=True):
                    if copy is not tensor:
                        copy.copy_(tensor)
                    memory.settle(copy.view(-1))

            # A message of its own: a persistent operation issues its message again and again.
            rest = {key: value for key, value in vars(message).items() if key != "prepare"}
            outputs = inputs if in_place else message.outputs
            message = Message(message.signature, inputs, outputs, **rest, prepare=prepare)
        return raw(message)

    direct: Callable[[Message], None] | None = getattr(raw, "run", None)
    if direct is not None:

        def run(message: Message) -> None:
            if owner.known is not None and owner.known.holds:
                issue(message).wait()
            else:
                direct(message)

        issue.run = run  # type: ignore[attr-defined]
    return issue


def _label(options: CompressOptions) -> str:
    """The codec, its options and what becomes of its losses: what ranks must agree on."""
    said = plain_options(options)
    text = json.dumps({key: said[key] for key in sorted(said) if key not in _LOCAL})
    return f"{options.codec}:{blake2b(text.encode(), digest_size=3).hexdigest()}"


def _named(signature: Signature) -> str | None:
    """An algorithm is named for the operation itself, which a codec takes apart into others."""
    if signature.backend is None or ":" not in signature.backend:
        return None
    return f"a codec makes other operations of it, for which {signature.backend} is not meant"


def _useless(codec: Codec, options: CompressOptions, signature: Signature, *, asked: bool) -> str | None:
    """Why it is not worth the while."""
    if signature.ranks == 1:
        return "a group of one rank sends nothing"
    nbytes = signature.nbytes
    if nbytes is None or signature.dtype is None:
        return None
    if options.exempt is not None and nbytes < options.exempt.below:
        return f"{format_size(nbytes)} is exempt"
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
    if wire >= (nbytes if one_way else raw):
        return f"{format_size(wire)} would travel instead of {format_size(nbytes if one_way else raw)}"
    return None
