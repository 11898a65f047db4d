"""Names of kinds and backends in configurations and tables."""

from __future__ import annotations

from typing import TypeVar

from mcr_plus import registry
from mcr_plus.config.document import Document, Keys, list_at
from mcr_plus.core.kinds import ALIASES, DTYPES, dtype_name
from mcr_plus.errors import short, unknown

T = TypeVar("T")


def kind_matches(pattern: str, kind: str) -> bool:
    """Return whether a kind named in a rule or table covers the kind of an operation.

    A kind covers its vector form (`all_gather` covers `all_gather_v`, not the reverse), `send` covers `recv`
    (both ends of a message use the same backend), and "*" covers everything.
    """
    return pattern == "*" or kind in (pattern, f"{pattern}_v") or (pattern, kind) == ("send", "recv")


def refuse_recv(name: str) -> str:
    """Return a kind's name; raise ValueError for `recv`: both ends of a message must choose the same."""
    if name == "recv":
        raise ValueError("a recv is treated like its send; write 'send', which covers both")
    return name


def read_backends(document: Document) -> tuple[str, ...] | None:
    """Return the validated list `backends` of a document; None without a list."""
    names = list_at(document, "backends")
    if names is None:
        return None
    if not names:
        raise document.error(("backends",), "empty list; expected at least one, or no such key for all")
    found: list[str] = []
    for index, text in enumerate(names):
        name = read_backend(text, document, ("backends", index))
        if name != backend_name(name):
            problem = (
                f"expected a backend without an algorithm, got {short(name)}; rules and calls name algorithms"
            )
            raise document.error(("backends", index), problem)
        if name in found:
            also = "" if text == name else f", as {text!r} too"
            problem = f"backend {name!r} is written twice{also}; expected it once"
            raise document.error(("backends", index), problem)
        found.append(name)
    return tuple(found)


def stored_backend(choice: T) -> T:
    """Return the stored and displayed form of `name` or `name:algorithm`: `msccl:ring` for `shm:ring`.

    A value other than a string is returned unchanged.
    """
    if not isinstance(choice, str):
        return choice
    name, colon, algorithm = choice.partition(":")
    return f"{registry.stored_name('backends', name)}{colon}{algorithm}"  # type: ignore[return-value]


def backend_name(choice: object) -> object:
    """Return the backend of `name` or `name:algorithm`; a value other than a string is returned unchanged."""
    return choice.partition(":")[0] if isinstance(choice, str) else choice


def names_no_algorithm(choice: object) -> bool:
    """Return whether a choice is `name:` without an algorithm after the colon."""
    return isinstance(choice, str) and choice.partition(":")[1:] == (":", "")


def read_backend(text: object, document: Document, keys: Keys) -> str:
    """Return the backend that a document names (`name` or `name:algorithm`), in its stored form.

    Raises `ConfigError` unless a backend of this name is registered.
    """
    known = registry.names("backends")
    name = stored_backend(text)
    if not isinstance(name, str) or backend_name(name) not in known:
        raise document.error(keys, unknown("backend", name, known))
    if names_no_algorithm(name):
        raise document.error(keys, f"{name!r} names no algorithm; expected name or name:algorithm")
    return name


DTYPE_NAMES: tuple[str, ...] = tuple(dtype_name(dtype) for dtype in DTYPES)


def kind_name(name: str) -> str:
    """Return the kind for a name in a rule or table: `all_to_all` for `all_to_all_single`."""
    return ALIASES.get(name, name)
