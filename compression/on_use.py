"""Stage `compress` until an operation has a codec: most jobs compress nothing, and do not load codecs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from mcr_plus.compression.options import CompressOptions
from mcr_plus.pipeline.stage import Context, Issue, Next, Stage

if TYPE_CHECKING:
    from mcr_plus.core.message import Signature
    from mcr_plus.pipeline.treatment import Treatment


class CompressOnUse(Stage):
    """Stage that binds operations without a codec itself, and leaves others to `CompressStage`."""

    Options = CompressOptions

    def __init__(self, options: CompressOptions, context: Context) -> None:
        self._options, self._context = options, context
        self._kept: MutableMapping[str, Any] = {}  # loaded state, until an operation has a codec
        self._stage: Stage | None = None

    def bind(self, signature: Signature, next: Next) -> Issue | Callable[..., Any]:
        """See `CompressStage`."""
        if self._stage is None and self._options.codec == "none" and signature.compress is None:
            return next(signature.replace(parts=None, key=None))
        return self._used().bind(signature, next)

    def treatment(self, signature: Signature, rest: Callable[[Signature], Treatment]) -> Treatment:
        """See `CompressStage`."""
        return self._used().treatment(signature, rest)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that this stage keeps."""
        return 0 if self._stage is None else self._stage.buffer_bytes

    def state(self) -> Mapping[str, Any]:
        """Return the state by operation name."""
        return {} if self._stage is None else self._stage.state()

    def load_state(self, kept: MutableMapping[str, Any]) -> None:
        """Restore the state of operations when they are bound."""
        self._kept = kept
        if self._stage is not None:
            self._stage.load_state(kept)

    def forget_state(self, is_over: Callable[[str], bool]) -> None:
        """Free the state of operations that are never issued again."""
        if self._stage is not None:
            self._stage.forget_state(is_over)
        else:
            for name in [name for name in self._kept if is_over(name)]:
                del self._kept[name]

    def _used(self) -> Stage:
        if self._stage is None:
            from mcr_plus.compression.stage import CompressStage

            self._stage = CompressStage(self._options, self._context)
            self._stage.load_state(self._kept)
        return self._stage
