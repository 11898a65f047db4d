"""Read large JSON documents incrementally, one element of a top-level list at a time.

    for key, value, byte in members(path, {"traceEvents"}):
        Place(path, byte, "event").fields(value, {"dur": NUMBER})

Memory is bounded by the largest single value, which has a limit. `FilePlace.fields` validates a value.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast

from mcr_plus.errors import ConfigError, short

_CHUNK: Final = 1 << 20  # bytes
_LARGEST: Final = 1 << 23  # maximum number of characters of a value; decoding takes 8 times the memory
_EXPECTED: Final = "a step that `step.save` wrote, or a trace of torch's profiler"
_SPACE: Final = " \t\n\r"
_OF_NUMBERS: Final = "0123456789.eE+-"
_HALF: Final = re.compile("[\ud800-\udfff]")


class FieldForm(NamedTuple):
    """Valid values of a field, as a description and a test."""

    expected: str
    fits: Callable[[Any], bool]


def is_whole(value: object) -> bool:
    """Return whether a value is an integer, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    """Return whether a value is text without lone surrogates, which UTF-8 cannot encode."""
    return isinstance(value, str) and (value.isascii() or not _HALF.search(value))


def within(least: int, most: int) -> FieldForm:
    """Return the form of whole numbers from `least` to `most`."""
    return FieldForm(
        f"a whole number from {least:,} to {most:,}", lambda value: is_whole(value) and least <= value <= most
    )


NUMBER: Final = FieldForm("a whole number of 64 bits", within(-(1 << 63), (1 << 63) - 1).fits)
TEXT: Final = FieldForm("a text", _is_text)
LABEL: Final = FieldForm("a text or a whole number", lambda value: _is_text(value) or is_whole(value))
LIST: Final = FieldForm("a list", lambda value: isinstance(value, list))
TEXTS: Final = FieldForm(
    "a list of texts",
    lambda value: isinstance(value, list) and all(map(_is_text, value)),
)


class FilePlace(NamedTuple):
    """Location of an object in a file, for error texts: first byte, kind, and name if it has one."""

    path: Path
    byte: int
    kind: str
    name: str | None = None

    def wrong(self, field: str, value: object, expected: str) -> ConfigError:
        """Return the error for a field with an invalid value."""
        of = self.kind if self.name is None else f"{self.kind} {short(self.name)}"
        return ConfigError(
            f"{self.path}: byte {self.byte}: {field} of {of}: {short(value)}; expected {expected}"
        )

    def fields(self, found: Any, forms: Mapping[str, FieldForm], inside: str = "") -> dict[str, Any]:
        """Return the fields of an object that are listed in `forms`; null counts as absent.

        `inside`: the field that contains the object. Raises `ConfigError` for a value that does not fit its
        form.
        """
        if found is None:
            return {}
        if not isinstance(found, dict):
            raise self.wrong(inside or "content", found, "an object")
        kept: dict[str, Any] = {}
        for name, form in forms.items():  # keys of `forms`, so that all objects share them
            value = cast("dict[str, Any]", found).get(name)
            if value is None:
                continue
            if not form.fits(value):
                raise self.wrong(f"{inside}.{name}" if inside else name, value, form.expected)
            kept[name] = value
        return kept


def members(path: Path, lists: Collection[str]) -> Iterator[tuple[str, Any, int]]:
    """Yield the members of an object: key, value, and the byte offset of the value.

    The elements of lists named in `lists` are yielded one at a time, with the name of the list as key. A
    top-level list is read as the first of `lists`. Files whose name ends with `.gz` are decompressed; byte
    offsets refer to the decompressed content.

    Raises:
        ConfigError: the file cannot be read, is not a JSON object, ends too early, or has a value of more
            than 8 Mi characters; the text has the file and the byte offset.
    """
    with _open(path) as file:
        reader = _Reader(path, file)
        try:
            yield from _members(reader, lists)
        except json.JSONDecodeError as error:
            raise reader.error(f"not JSON: {error.msg}", error.pos) from None
        except RecursionError:
            raise reader.error("not JSON that can be read: nested too deeply") from None
        except ValueError:
            raise reader.error("not JSON that can be read: a whole number of thousands of digits") from None


def _members(reader: _Reader, lists: Collection[str]) -> Iterator[tuple[str, Any, int]]:
    first = reader.first()
    if first == "[":
        name = next(iter(lists))
        yield from ((name, value, place) for value, place in reader.elements())
        return
    if first != "{":
        raise reader.error(f"not a JSON object; expected {_EXPECTED}")
    reader.skip()
    while reader.peek() != "}":
        key, _ = reader.value()
        if not isinstance(key, str) or reader.peek() != ":":
            raise reader.error("not JSON: expected a name and ':'")
        reader.skip()
        if key in lists and reader.peek() == "[":
            yield from ((key, value, place) for value, place in reader.elements())
        else:
            yield (key, *reader.value())
        if not reader.comma("}"):
            break


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    """Open a regular file. O_NONBLOCK, because opening a FIFO without a writer would block."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: the name contains a null byte
        raise ConfigError(f"{path}: cannot read: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{path}: cannot read: not a regular file")
    with open(descriptor, "rb") as file:
        if path.name.endswith(".gz"):
            with gzip.GzipFile(fileobj=file) as content:
                yield cast("IO[bytes]", content)
        else:
            yield file


class _Reader:
    """The part of the text that is in memory, with a current position."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        self._file = file
        self._text = ""
        self._at = 0
        self._known = (0, 0)  # a position in the text, and its byte offset
        self._ended = False
        self._decode = json.JSONDecoder().raw_decode
        self._utf8 = codecs.getincrementaldecoder("utf-8")()

    def error(self, problem: str, at: int | None = None) -> ConfigError:
        """Return an error at a position in the text, by default the current one."""
        return ConfigError(f"{self._path}: byte {self._place(at)}: {problem}")

    def _place(self, at: int | None = None) -> int:
        at = self._at if at is None else at
        known, byte = self._known
        if at < known:  # an error in a value that began earlier
            return byte - len(self._text[at:known].encode())
        self._known = (at, byte + len(self._text[known:at].encode()))
        return self._known[1]

    def _more(self) -> bool:
        """Read the next chunk and discard consumed text; returns False at the end of the file."""
        if self._ended:
            return False
        try:
            chunk = self._file.read(max(_CHUNK, len(self._text) - self._at))  # decoding restarts per chunk
            text = self._utf8.decode(chunk, final=not chunk)
        except (EOFError, OSError, zlib.error) as error:
            raise self.error(f"cannot read further: {error}", len(self._text)) from None
        except UnicodeDecodeError:
            raise self.error("not UTF-8", len(self._text)) from None
        self._ended = not chunk
        self._known = (0, self._place())
        self._text, self._at = self._text[self._at :] + text, 0
        return bool(chunk)

    def peek(self) -> str:
        """Return the next non-space character without consuming it."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _SPACE:
                    return self._text[self._at]
                self._at += 1
            if not self._more():
                raise self.error("truncated: the file ends within a JSON value")

    def first(self) -> str:
        """Return the first character of the document; raises `ConfigError` if there is none."""
        while not self._text.strip(_SPACE):
            if not self._more():
                raise self.error(f"an empty file; expected {_EXPECTED}")
        return self.peek()

    def skip(self) -> None:
        """Consume one character."""
        self._at += 1

    def comma(self, closing: str) -> bool:
        """Consume a comma and return True, or consume the closing bracket and return False."""
        found = self.peek()
        if found not in (",", closing):
            raise self.error(f"not JSON: expected ',' or '{closing}'")
        self.skip()
        return found == ","

    def value(self) -> tuple[Any, int]:
        """Return the next value and its byte offset."""
        self.peek()
        place = -1
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # Reading more text cannot correct an error before the end of the text.
                is_cut = "Unterminated" in error.msg or error.pos >= len(self._text.rstrip()) - 1
                if self._ended or (error.pos < len(self._text) - 16 and not is_cut):
                    if is_cut:
                        raise self.error(
                            "truncated: the file ends within a JSON value", len(self._text)
                        ) from None
                    raise
            else:
                is_whole = end < len(self._text) and not (
                    isinstance(value, (int, float)) and not self._text[end:].strip(_OF_NUMBERS)
                )
                if is_whole or self._ended:
                    place = self._place()
                    self._at = end
                    return value, place
            if len(self._text) - self._at > _LARGEST:
                raise self.error(f"a value of more than {_LARGEST >> 20} MiB")
            self._more()

    def elements(self) -> Iterator[tuple[Any, int]]:
        """Yield the elements of the list at the current position."""
        self.skip()
        if self.peek() == "]":
            self.skip()
            return
        while True:
            yield self.value()
            if not self.comma("]"):
                return
