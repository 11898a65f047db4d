"""Names of kinds and backends in configurations and tables."""

from __future__ import annotations

from mcr_plus import registry
from mcr_plus.config.document import Document, Keys, list_at
from mcr_plus.core.kinds import ALIASES, DTYPES, dtype_name
from mcr_plus.errors import short, unknown


def kind_matches(pattern: str, kind: str) -> bool:
    """Whether a kind named in a rule or table covers the kind of an operation.

    A kind covers its vector form (`all_gather` covers `all_gather_v`, not the reverse), `send` covers `recv`
    (both ends of a message use the same backend), and "*" covers everything.
    """
    return pattern == "*" or kind in (pattern, f"{pattern}_v") or (pattern, kind) == ("send", "recv")


def refuse_recv(name: str) -> str:
    """Return a kind's name; raises ValueError for `recv`, since both ends of a message must choose alike."""
    if name == "recv":
        raise ValueError("a recv is treated like its send; write 'send', which covers both")
    return name


def read_backends(document: Document) -> tuple[str, ...] | None:
    """Return the list `backends` of a document, checked; None if there is none."""
    names = list_at(document, "backends")
    if names is None:
        return None
    if not names:
        raise document.error(("backends",), "empty list; expected at least one, or no such key for all")
    for index, name in enumerate(names):
        check_backend(name, document, ("backends", index))
        if name != backend_name(name):
            problem = (
                f"expected a backend without an algorithm, got {short(name)}; rules and calls name algorithms"
            )
            raise document.error(("backends", index), problem)
        if name in names[:index]:
            raise document.error(("backends", index), f"backend {name!r} is written twice; expected it once")
    return tuple(names)


def backend_name(choice: object) -> object:
    """Return the backend of `name` or `name:algorithm`; a value that is no string is returned unchanged."""
    return choice.partition(":")[0] if isinstance(choice, str) else choice


def names_no_algorithm(choice: object) -> bool:
    """Whether a choice is `name:` without an algorithm after the colon."""
    return isinstance(choice, str) and choice.partition(":")[1:] == (":", "")


def check_backend(name: object, document: Document, keys: Keys) -> None:
    """Raise `ConfigError` unless `name`, or the name in `name:algorithm`, is that of a registered backend."""
    known = registry.names("backends")
    if backend_name(name) not in known:
        raise document.error(keys, unknown("backend", name, known))
    if names_no_algorithm(name):
        raise document.error(keys, f"{name!r} names no algorithm; expected name or name:algorithm")


DTYPE_NAMES: tuple[str, ...] = tuple(dtype_name(dtype) for dtype in DTYPES)


def kind_name(name: str) -> str:
    """Return the kind that a name in a rule or table means: `all_to_all` for `all_to_all_single`."""
    return ALIASES.get(name, name)
