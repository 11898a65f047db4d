"""Check the arguments of `mcr.local`."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast
from weakref import WeakSet

import torch

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.compression.options import CompressOptions, codec_of
from mcr_plus.compression.policy import options_from_call, refusal
from mcr_plus.compression.stage import prepare
from mcr_plus.core.message import Signature, frozen
from mcr_plus.core.units import whole_number
from mcr_plus.errors import InvalidArgument
from mcr_plus.local_sgd.fragments import Fragment, Named, Outer, cut, layers_of
from mcr_plus.training.foreign_optimizers import watch_steps
from mcr_plus.training.parameters import refuse_lazy, unaveraged

if TYPE_CHECKING:
    from mcr_plus.local_sgd.local import LocalSteps

GATES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT_OUTER: Final[Outer] = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""Default outer optimizer, as in DiLoCo."""


@dataclass(frozen=True)
class Settings:
    """Checked arguments of `mcr.local`."""

    every: int
    fragments: int
    delay: int
    mix: float
    compress: str | Mapping[str, Any] | bool | None
    uneven: bool
    weighted: bool
    warmup: int
    gate: torch.dtype | None


def checked(
    every: object,
    fragments: object,
    delay: object,
    mix: object,
    compress: Any,
    uneven: object,
    weighted: object,
    warmup: object,
    gate: object,
) -> Settings:
    """Return the checked settings, or raise `InvalidArgument`."""
    every, fragments = _count("every", every, 1), _count("fragments", fragments, 1)
    delay, warmup = _count("delay", delay, 0), _count("warmup", warmup, 0)
    if fragments > every:
        raise InvalidArgument(
            f"fragments: {fragments} cannot be sent in {every} steps, one after each; expected 1 to {every}, "
            "or a larger every"
        )
    if delay >= every:
        raise InvalidArgument(
            f"delay: expected fewer steps than every ({every}), so that a fragment has arrived before it is "
            f"sent again; got {delay}"
        )
    if isinstance(mix, bool) or not isinstance(mix, (int, float)) or not 0 < mix <= 1:
        raise InvalidArgument(f"mix: expected a number above 0 and up to 1, got {mix!r}")
    for name, value in (("uneven", uneven), ("weighted", weighted)):
        if not isinstance(value, bool):
            raise InvalidArgument(f"{name}: expected True or False, got {value!r}")
    if gate is not None and gate not in GATES:
        raise InvalidArgument(f"gate: expected one of {', '.join(GATES)} or None, got {gate!r}")
    return Settings(
        every,
        fragments,
        delay,
        float(mix),
        compress,
        bool(uneven),
        bool(weighted) or bool(uneven),
        warmup,
        None if gate is None else GATES[str(gate)],
    )


def _count(name: str, value: object, least: int) -> int:
    number = whole_number(value)
    if number is None or number < least:
        what = "a number" if name == "fragments" else "a number of steps"
        raise InvalidArgument(f"{name}: expected {what} from {least}, got {value!r}")
    return number


def check_call(inner: torch.optim.Optimizer, closure: object, scaler: object, *, warmup: bool) -> None:
    """Raise `InvalidArgument` for arguments of `step` that cannot be combined."""
    if closure is not None and not callable(closure):
        raise InvalidArgument(f"closure: expected a function or None, got {closure!r}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InvalidArgument(f"scaler: expected a torch.amp.GradScaler or None, got {scaler!r}")
    if closure is not None and scaler is not None:
        raise InvalidArgument("closure: torch's GradScaler does not support a closure; pass only one of them")
    if closure is not None and warmup:
        raise InvalidArgument(
            "closure: in the warm-up ranks average gradients, and an optimizer may call its closure more "
            "often on one of them than on another; use warmup=0, or step without a closure"
        )
    if closure is None and needs_closure(inner):
        raise InvalidArgument(f"closure: {type(inner).__name__} needs one, got None")


def needs_closure(inner: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer needs a closure for a step."""
    found = inspect.signature(inner.step).parameters.get("closure")
    return found is not None and found.default is inspect.Parameter.empty


def trained(model: torch.nn.Module, inner: torch.optim.Optimizer) -> list[Named]:
    """Return the participating parameters, each once: trained parameters without `mcr_skip`."""
    refuse_lazy((*model.named_parameters(), *model.named_buffers()))
    named = [
        (name, param)
        for name, param in model.named_parameters()
        if param.requires_grad and not getattr(param, "mcr_skip", False)
    ]
    sharded = [name for name, param in named if hasattr(param, "placements")]
    if sharded:
        raise InvalidArgument(
            f"model: '{sharded[0]}' is a DTensor, of which a rank has a part; mcr.local needs replicas"
        )
    if not named:
        raise InvalidArgument("model: no parameter is trained; expected one with requires_grad")
    held = {id(param) for group in inner.param_groups for param in group["params"]}
    if not any(id(param) in held for _, param in named):
        raise InvalidArgument("inner: holds none of the model's parameters, so it cannot train the model")
    outside = held - {id(param) for param in model.parameters()}
    if outside:
        raise InvalidArgument(
            f"inner: {len(outside)} of its parameters are not the model's, and would not be averaged; "
            "expected a model that contains all of them"
        )
    unreal = [name for name, param in named if param.is_complex()]
    if unreal:
        raise InvalidArgument(f"model: '{unreal[0]}' is complex; expected real parameters")
    return named


def fragments_of(named: Sequence[Named], settings: Settings, outer: Any) -> list[Fragment]:
    """Divide the parameters into fragments of similar size; a fragment consists of whole layers."""
    layers = layers_of(named)
    if settings.fragments > len(layers):
        raise InvalidArgument(
            f"fragments: expected at most as many as modules with trained parameters ({len(layers)}), got "
            f"{settings.fragments}"
        )
    sizes = [sum(param.numel() for _, param in layer) for layer in layers]
    dtype = torch.float64 if any(param.dtype is torch.float64 for _, param in named) else torch.float32
    make: Any = DEFAULT_OUTER if outer is None else outer
    if isinstance(make, torch.optim.Optimizer) or not callable(make):
        raise InvalidArgument(
            "outer: expected a class of optimizers or a function that makes one of a list of parameters, as "
            f"in functools.partial(torch.optim.SGD, lr=0.7); got {type(outer).__name__}"
        )
    fragments = [
        Fragment(index, [each for layer in run for each in layers[layer]], cast("Outer", make), dtype)
        for index, run in enumerate(cut(sizes, settings.fragments))
    ]
    for fragment in fragments:
        if not isinstance(fragment.optimizer, torch.optim.Optimizer):
            raise InvalidArgument(
                f"outer: expected it to return an optimizer, got {type(fragment.optimizer).__name__}"
            )
        if needs_closure(fragment.optimizer):
            raise InvalidArgument(
                f"outer: {type(fragment.optimizer).__name__} needs a closure, and an outer step has none; "
                "expected an optimizer that makes a step without"
            )
    return fragments


def check_compression(compress: Any, fragments: Sequence[Fragment], comm: Communicator) -> None:
    """Raise `InvalidArgument` if the codec does not support the fragments."""
    if compress is None or compress is False:
        return
    if not isinstance(compress, (str, Mapping)):
        raise InvalidArgument(
            f"compress: expected None, False, a codec's name or a mapping, got {compress!r}"
        )
    if isinstance(compress, Mapping) and not all(isinstance(key, str) for key in compress):
        raise InvalidArgument(f"compress: expected names of options as keys, got {list(compress)}")
    if comm.config.options("compress") is None:
        raise InvalidArgument(
            f"compress: {compress!r}, but the pipeline has no stage compress; add it to the configuration"
        )
    for fragment in fragments:
        anchor = fragment.anchor
        signature = Signature(
            "all_reduce",
            anchor.dtype,
            tuple(anchor.shape),
            anchor.nbytes,
            comm.name,
            comm.size,
            "cpu",
            reduce_op="AVG",
            tag=fragment.tag,
            compress=frozen(compress) if isinstance(compress, Mapping) else compress,
        )
        options: CompressOptions = options_from_call(signature)
        if options.codec == "none":
            return
        codec = codec_of(options)
        reason = refusal(codec, options, signature)
        if reason is not None:
            raise InvalidArgument(
                f"compress: {compress!r} for {fragment.tag}: {reason}; each fragment is averaged as one "
                "vector: expected a codec for that, such as int8_block, int4_block or topk"
            )
        prepare(codec, anchor.dtype)  # load the kernels now, not in the first window


_stepping: Final = WeakSet[torch.optim.Optimizer]()


@contextmanager
def stepping(inner: torch.optim.Optimizer) -> Iterator[None]:
    """Allow steps of an optimizer within this block, see `refuse_other_steps`."""
    _stepping.add(inner)
    try:
        yield
    finally:
        _stepping.discard(inner)


def refuse_other_steps(local: LocalSteps) -> None:
    """Make optimizer steps outside of `local.step` raise `InvalidArgument`: they would not be averaged.

    They cannot count as steps of `local`, because a GradScaler may skip a step on some ranks only.
    """
    owner = weakref.ref(local, lambda _: handle.remove())

    def before(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        if owner() is not None and optimizer not in _stepping:
            raise InvalidArgument(
                "optimizer.step() was called on the optimizer of mcr.local, so nothing would be "
                "averaged; call local.step() in its place (with a GradScaler: local.step(scaler=scaler)), or "
                "first delete the object that mcr.local has returned"
            )

    handle = local.inner.register_step_pre_hook(before)
    watch_steps(local, local.model, _refuse_another)


def _refuse_another(local: LocalSteps, optimizer: torch.optim.Optimizer, *_: bool) -> None:
    if optimizer is local.inner or optimizer in _stepping or unaveraged(local.named) is None:
        return
    raise InvalidArgument(
        f"optimizer.step() was called on another optimizer ({type(optimizer).__name__}) of the model of "
        "mcr.local, so nothing would be averaged; pass one optimizer of all parameters to mcr.local (with "
        "param_groups for settings of their own), and call local.step() in place of its step(), or first "
        "delete the object that mcr.local has returned"
    )
