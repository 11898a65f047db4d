"""compress: rewrites an operation into operations on encoded values, which flow on like any other."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import torch

from mcr_plus.compression.audit import audited
from mcr_plus.compression.choice import asked_for
from mcr_plus.compression.codec import Codec
from mcr_plus.compression.compose import composition, wire_bytes
from mcr_plus.compression.ef21 import Ef21
from mcr_plus.compression.error_feedback import ErrorFeedback, MomentumCorrection
from mcr_plus.compression.memory import Memory
from mcr_plus.compression.never_slower import never_slower
from mcr_plus.compression.pool import Pool
from mcr_plus.config import CompressOptions, codec_of
from mcr_plus.dispatch.work import Work
from mcr_plus.errors import Unsupported
from mcr_plus.interfaces import Context, Issue, Next
from mcr_plus.message import REDUCING, VECTOR, Message, Signature, dtype_name
from mcr_plus.units import format_size

_SUMS = ("SUM", "AVG")
_SAME_EVERYWHERE = ("all_reduce", "all_gather", "broadcast")  # kinds after which ranks hold equal tensors
_FED_BACK = {
    "error_feedback": ("all_reduce", "reduce", "reduce_scatter"),
    "ef21": ("all_reduce",),
    "momentum_correction": ("all_reduce",),
}


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

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that this stage keeps."""
        return self._pool.nbytes

    @property
    def owners(self) -> Mapping[str, Owner]:
        """Who keeps something between calls, by names that are the same on all ranks and in the next job."""
        return self._owners

    def bind(self, signature: Signature, next: Next) -> Issue:
        """Bind to the operations on encoded values, or to the operation itself."""
        wanted = signature.compress
        plain = signature.replace(compress=None, parts=None, key=None)
        options = self._options if wanted is None else asked_for(signature)
        if options.codec == "none":
            if wanted is not None:
                next.note("off, by the call")
            return next(plain)
        if not signature.nbytes and signature.nbytes is not None:
            return next(plain)
        codec, asked = codec_of(options), wanted is not None
        reason = None if signature.ranks == 1 else _refusal(codec, options, signature)
        if reason is not None and asked:
            raise Unsupported(f"compress={wanted!r} on {plain.describe()}: {reason}")
        reason = reason or _useless(codec, options, signature, asked=asked)
        if reason is not None:
            next.note(f"codec {codec.name} not used: {reason}")
            return next(plain)
        return self._compressed(codec, options, signature.replace(compress=None), next)

    def _compressed(self, codec: Codec, options: CompressOptions, full: Signature, next: Next) -> Issue:
        plain = full.replace(parts=None, key=None)
        owner = Owner(codec, options, full, self._group.rank)
        if full.key is not None or full.tag is not None:
            # The ways of one operation, such as async or not, share what is kept.
            owner = self._owners.setdefault(owner.name, owner)
            if owner.name in self._restored:
                owner.restore(self._restored.pop(owner.name))
        chosen = composition(owner.codec, full)
        composed = chosen(owner.codec, full, self._group.rank, owner.memory, self._pool)
        audit_every = options.audit_every if plain.kind in _SAME_EVERYWHERE else None
        says = [f"codec {codec.name}: {composed.says}"]
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
        self.restored: dict[str, torch.Tensor] = {}
        self.calls = 0
        self._options = options
        self._memory: Memory | None = None
        what = signature.replace(ranks=0, nbytes=None, backend=None, async_op=False)
        self.name = f"{what.describe()} {json.dumps(codec.config(), sort_keys=True)}"
        codec.enter(rank, self.name)

    def memory(self, device: torch.device, numel: int) -> Memory:
        """What lies between the operation's values and the codec."""
        if self._memory is None:
            self._memory = self._made(device, numel)
            if self.restored:
                self._memory.restore(self.restored)
        return self._memory

    @property
    def known(self) -> Memory | None:
        """The memory, if there has been a call."""
        return self._memory

    def restore(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Take what another job has kept, now or at the first call."""
        self.restored = dict(kept)
        if self._memory is not None:
            self._memory.restore(kept)

    def _made(self, device: torch.device, numel: int) -> Memory:
        options = self._options
        if options.error_feedback is not None:
            return ErrorFeedback(self.codec, numel, device, options.error_feedback.decay)
        if options.momentum_correction is not None:
            return MomentumCorrection(self.codec, numel, device, options.momentum_correction.momentum)
        return Ef21(self.codec, numel, device) if options.ef21 else Memory(self.codec)


def _after(calls: int, raw: Issue, compressed: Issue, owner: Owner) -> Issue:
    """The first `calls` calls go one way, the others another."""

    def issue(message: Message) -> Work:
        if owner.calls < calls and not owner.restored:
            owner.calls += 1
            return raw(message)
        return compressed(message)

    return issue


def _settled(raw: Issue, owner: Owner) -> Issue:
    """An uncompressed operation, whose values take along what earlier calls have left."""

    def issue(message: Message) -> Work:
        memory = owner.known
        if memory is not None and memory.holds:
            earlier, values = message.prepare, [tensor.view(-1) for tensor in message.inputs]

            def prepare() -> None:
                if earlier is not None:
                    earlier()
                for each in values:
                    memory.settle(each)

            # A message of its own: a persistent operation issues its message again and again.
            rest = {key: value for key, value in vars(message).items() if key != "prepare"}
            message = Message(message.signature, message.inputs, message.outputs, **rest, prepare=prepare)
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


def _refusal(codec: Codec, options: CompressOptions, signature: Signature) -> str | None:
    """Why an operation cannot be compressed."""
    traits, kind = codec.traits, signature.kind
    if signature.dtype not in traits.dtypes:
        return f"codec {codec.name} takes {', '.join(map(dtype_name, traits.dtypes))}"
    if traits.kinds is not None and kind not in traits.kinds:
        return f"codec {codec.name} is for {', '.join(sorted(traits.kinds))}"
    if signature.is_p2p and not traits.fixed_rate:
        return f"payloads of codec {codec.name} differ in length, which a receiver must know beforehand"
    if kind in REDUCING and signature.reduce_op not in _SUMS:
        return f"codec {codec.name} allows the reduce ops {', '.join(_SUMS)}"
    feedback = options.feedback
    if feedback is not None:
        if kind not in _FED_BACK[feedback]:
            return f"{feedback} is for {', '.join(_FED_BACK[feedback])}"
        if signature.key is None and signature.tag is None:
            return f"{feedback} must know which tensor it is, call by call; expected tag="
    return None if kind in VECTOR else codec.refusal(signature.parts or (signature.shape,))


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
