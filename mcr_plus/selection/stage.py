"""select: which library an operation goes to."""

from __future__ import annotations

from typing import Final

from mcr_plus import registry
from mcr_plus.backends import backend_class
from mcr_plus.config import SelectOptions
from mcr_plus.errors import Unsupported
from mcr_plus.interfaces import Context, Issue, Next, Support
from mcr_plus.message import Signature, dtype_name
from mcr_plus.selection.table import Table, load_table

# Between hosts MPI wins small messages and gloo large ones, from about 64 KiB on; inside a host MPI wins
# everywhere. Measured with Open MPI 5.0 and gloo of torch 2.13 on two x86 cores; `tune` finds your own.
_CROSSOVER: Final = 64 * 1024


class SelectStage:
    """Chooses by, in this order: the caller or a rule, the tuning table, the built-in preference.

    A named backend that cannot do the operation is an error. Only the built-in preference falls back,
    along the configuration's `backends`, and says so.
    """

    def __init__(self, options: SelectOptions, context: Context) -> None:
        self._table: Table | None = load_table(options.table.resolve()) if options.table is not None else None
        self._context = context

    def bind(self, signature: Signature, next: Next) -> Issue:
        """Bind to the chosen backend."""
        choice, why = self._choose(signature)
        name, _, algorithm = choice.partition(":")
        chosen = signature.replace(backend=name, algorithm=algorithm or None)
        support = self._context.backends[name].supports(chosen)
        how = "" if support.level == "native" else f", emulated: {support.how}"
        next.note(f"backend {choice} ({why}{how})")
        return next(chosen)

    def _choose(self, signature: Signature) -> tuple[str, str]:
        if signature.ranks == 1:
            if signature.backend is not None:
                registry.get(
                    "backends", signature.backend.partition(":")[0]
                )  # an unknown name is an error here too
            return "local", "a group of one rank needs no library"
        if signature.backend is not None:
            self._require(signature.backend, signature, "asked for by name")
            return signature.backend, "named by the call or a rule"
        if self._table is not None:
            row = self._table.lookup(
                signature.kind,
                signature.nbytes,
                dtype_name(signature.dtype),
                ranks=signature.ranks,
                device=signature.device,
            )
            if row is not None:
                self._require(row.backend, signature, f"chosen by {row.place}")
                return row.backend, f"table {row.place}"
        return self._preferred(signature)

    def _preferred(self, signature: Signature) -> tuple[str, str]:
        refused: list[str] = []
        for name in self._preference(signature):
            support = self._support(name, signature)
            if support:
                skipped = f" after {'; '.join(refused)}" if refused else ""
                return name, f"built-in preference{skipped}"
            refused.append(f"{name}: {support.how}")
        raise Unsupported(
            f"no backend can do {signature.describe()}: {'; '.join(refused) or 'none is there'}"
        )

    def _preference(self, signature: Signature) -> list[str]:
        known = list(self._context.backends)
        order = known if self._context.config.backends is not None else self._built_in(signature)
        return [name for name in order if name in known] + [name for name in known if name not in order]

    def _built_in(self, signature: Signature) -> list[str]:
        if signature.device == "cuda":
            return ["nccl", "mpi", "gloo"]
        large = signature.nbytes is None or signature.nbytes >= _CROSSOVER
        if large and not self._context.world.single_host:
            return ["gloo", "mpi"]
        return ["mpi", "gloo"]

    def _support(self, choice: str, signature: Signature) -> Support:
        name, _, algorithm = choice.partition(":")
        return self._context.backends[name].supports(
            signature.replace(backend=name, algorithm=algorithm or None)
        )

    def _require(self, choice: str, signature: Signature, why: str) -> None:
        name = choice.partition(":")[0]
        known = self._context.backends
        if name not in known:
            found = backend_class(name).availability()
            missing = "" if found.available else f" ({found.reason}; {found.remedy})"
            raise Unsupported(
                f"backend '{name}' ({why}) is not part of this job{missing}; "
                f"backends here: {', '.join(known)}"
            )
        support = self._support(choice, signature)
        if not support:
            others = [other for other in known if self._support(other, signature)]
            raise Unsupported(
                f"backend '{choice}' ({why}) cannot do {signature.describe()}: {support.how}; "
                f"backends that can: {', '.join(others) or 'none'}"
            )
