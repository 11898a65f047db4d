"""YAML documents with the line of every entry; no other module reads YAML.

    read_document("run.yaml")        a Document: plain data, and the line of every entry
    dict_document({"version": 1})    the same from a mapping in Python
    document.error(keys, problem)    a ConfigError that begins with `file:line: path:`

A document is plain data: one mapping without tags, anchors, aliases or duplicate keys. YAML features that let
a short file expand into something large, hidden or executable are refused.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final, TypeVar

from mcr_plus.core.collector import collector_paused
from mcr_plus.errors import ConfigError, short, unknown

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 32
NO_FILE: Final = "configuration"
"""Name of a configuration that is a dict, used as the place of mistakes."""

Keys = tuple[str | int, ...]
T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Document:
    """Plain data (dict, list, str, int, float, bool, None), and the place of each entry in the source.

    Relative paths in the document are relative to `folder`.
    """

    data: dict[str, Any]
    name: str
    folder: Path
    lines: Mapping[Keys, int] | None = None

    def place(self, keys: Keys) -> str:
        """Return `file:line` of the entry at `keys`, or of the closest enclosing one; for a dict its name."""
        if self.lines is None:
            return self.name
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return f"{self.name}:{self.lines.get(keys, 1)}"

    def error(self, keys: Keys, problem: str) -> ConfigError:
        """Return an error that begins with the place of the entry at `keys`."""
        return self.errors([(keys, problem)])

    def errors(self, problems: Iterable[tuple[Keys, str]]) -> ConfigError:
        """Return one error for several entries: a line with the place and the problem of each."""
        return ConfigError(
            "\n".join(f"{self.place(keys)}: {path_text(keys)}: {problem}" for keys, problem in problems)
        )


class Mistakes:
    """Collects the errors of a document, so that all are reported at once."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def __len__(self) -> int:
        """Return the number of collected lines."""
        return len(self._lines)

    def collect(self, read: Callable[[], T], default: U) -> T | U:
        """Call `read` and return its result; a `ConfigError` is collected, and `default` returned."""
        try:
            return read()
        except ConfigError as error:
            self._lines += str(error).splitlines()
            return default

    def raise_all(self) -> None:
        """Raise one `ConfigError` with a line per mistake, by file and line, if there are mistakes."""
        if not self._lines:
            return
        lines = list(dict.fromkeys(self._lines))
        files = list(dict.fromkeys(_file_and_line(line)[0] for line in lines))

        def place(line: str) -> tuple[int, int]:
            file, number = _file_and_line(line)
            return files.index(file), number

        raise ConfigError("\n".join(sorted(lines, key=place)))


def _file_and_line(mistake: str) -> tuple[str, int]:
    """Return the file and the line of a mistake; `("", 0)` without a line."""
    place = re.match(r"(.+?):(\d+): ", mistake)
    return (place[1], int(place[2])) if place else ("", 0)


def path_text(keys: Keys) -> str:
    """Return the path of an entry as in errors: `pipeline[1].compress.codec`."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.removeprefix(".") or "document"


def read_document(path: str | Path, *, versioned: bool = True) -> Document:
    """Read a YAML file of at most 1 MiB; raise `ConfigError` for anything but plain data.

    `versioned`: the file must have a key `version`; see `parse_document`.
    """
    name, path = str(path), Path(path)
    return parse_document(_read_text(path, name), name, path.parent, versioned=versioned)


def read_bytes(path: Path, place: str, *, most: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a regular file of at most `most` bytes, a whole number of MiB.

    Raises `ConfigError` for other files, because a FIFO may have no writer, and a device no end. The error
    begins with `place`, and also names the file, unless `place` is the file.
    """
    name = "" if place == str(path) else f" {str(path)!r}"
    try:
        descriptor = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        )  # without O_NONBLOCK, opening a FIFO waits for a writer
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"{place}: cannot read{name}: not a regular file")
            content = read_up_to(file, most + 1)
    except (OSError, ValueError) as error:  # ValueError: the name has a null byte
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{place}: cannot read{name}: {reason}") from None
    if len(content) > most:
        raise ConfigError(f"{place}:{name or ' the file'} is larger than {most >> 20} MiB")
    return content


def read_up_to(file: IO[bytes], most: int) -> bytes:
    """Read a file up to its end, but at most `most` bytes.

    `file.read(most)` would allocate `most` bytes before it reads, however short the file is.
    """
    content = file.read(min(most, os.fstat(file.fileno()).st_size + 1))
    while len(content) < most and (more := file.read(min(most - len(content), 1 << 20))):
        content += more  # /proc states no sizes, and files grow
    return content


def write_text(path: Path, text: str) -> None:
    """Write a regular file; raise `ConfigError` for other files, since a FIFO may have no reader."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: cannot write: not a regular file")
        path.write_text(text, "utf-8", "backslashreplace")  # a name may contain bytes that are not text
    except (OSError, ValueError) as error:  # ValueError: the name has a null byte
        raise ConfigError(f"{path}: cannot write: {getattr(error, 'strerror', None) or error}") from None


def _read_text(path: Path, place: str) -> str:
    try:
        return read_bytes(path, place).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: not UTF-8 at byte {error.start}; expected YAML text") from None


def parse_document(text: str, name: str, folder: Path, *, versioned: bool = True) -> Document:
    """Parse YAML text: one document, a mapping at the root, no tags, anchors, aliases or duplicate keys.

    `versioned`: the mapping must have a key `version`. A file without this key is not a configuration and may
    contain secrets, so errors do not quote it.
    """
    from mcr_plus.config.parsing import parse_mapping  # lazy: a job without a file needs no PyYAML

    lines: dict[Keys, int] = {}
    document = Document({}, name, folder, lines)
    with collector_paused():
        return replace(document, data=parse_mapping(text, document, lines, versioned=versioned))


def dict_document(data: Mapping[str, Any], name: str = NO_FILE, folder: Path | None = None) -> Document:
    """Copy a mapping into plain data; raise `ConfigError` for values that YAML cannot represent."""
    place = Document({}, name, folder or Path())
    copied = _copy(data, (), place)
    if not isinstance(copied, dict):
        raise place.error((), f"expected a mapping at the root, got {short(data)}")
    return replace(place, data=copied)


def _copy(value: object, keys: Keys, document: Document) -> Any:
    if len(keys) > MAX_DEPTH:
        raise document.error(keys[:2], f"nested more than {MAX_DEPTH} levels deep, or contains itself")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise document.error(keys, f"expected a name as key, got {short(key)}")
        return {key: _copy(item, (*keys, key), document) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(item, (*keys, i), document) for i, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise document.error(keys, f"expected plain data, got {short(value)}")


# --- Checks of every kind of document -------------------------------------------------------------------


def mapping_at(document: Document, keys: Keys, example: str = "") -> dict[str, Any]:
    """Return the mapping at `keys`; an entry without a value (null) is an empty mapping.

    `example`: a mapping to show in the error for another value.
    """
    value: Any = document.data
    for key in keys:
        value = value[key]
    if value is None:
        return {}
    if not isinstance(value, dict):
        such = f" such as {example}" if example else ""
        raise document.error(keys, f"expected a mapping{such}, got {short(value)}")
    return value


def list_at(document: Document, key: str) -> list[Any] | None:
    """Return the list at a key of the root (None without the key); raise `ConfigError` for other values."""
    value = document.data.get(key)
    if value is not None and not isinstance(value, list):
        raise document.error((key,), f"expected a list, got {short(value)}")
    return value


def check_keys(document: Document, keys: Keys, known: Sequence[str]) -> None:
    """Raise one `ConfigError` for all unknown keys of the mapping at `keys`, if there are any."""
    strange = [key for key in mapping_at(document, keys) if key not in known]
    if strange:
        raise document.errors([((*keys, key), unknown("key", key, known)) for key in strange])


def check_version(version: object, document: Document) -> None:
    """Raise `ConfigError` unless `version` is the version that this release reads."""
    if version is None:
        raise document.error(("version",), "missing; expected version: 1")
    if isinstance(version, bool) or not isinstance(version, int) or version != 1:
        raise document.error(("version",), f"unknown version {short(version)}; known: 1")
