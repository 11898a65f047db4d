"""The status page of a rank: memory in which the rank publishes its activity, for `mcr-plus top`.

The page is a memfd that only processes of the rank's user can open, through /proc. Nothing is left behind
when the rank ends, and a reader cannot disturb the writer. Format, little-endian:

    bytes
    0..8      `mcr_plus`
    8..12     number of this format, `LAYOUT`
    12..16    length of the description of the rank and its job
    16..24    number of the latest picture; 0 before the first
    24..28    bytes of each of the two places for pictures
    32..40    lengths of the pictures in both places
    64..96    version of mcr_plus
    128..     the description, then the two places

The description and the pictures are JSON objects. Picture n is in place n mod 2, so the latest picture is
complete even if the writer was stopped while it wrote the next one. The first 12 bytes and the version are in
the same place in all formats.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

NAME: Final = "mcr_plus:status"
LAYOUT: Final = 1
_MAGIC: Final = b"mcr_plus"
_HEADER: Final = 128
_FIXED: Final = struct.Struct("<8sII")
_LATEST: Final = 16
_ROOM: Final = 24
_LENGTHS: Final = 32
_VERSION: Final = slice(64, 96)
PICTURE: Final = 1 << 18
"""Bytes of each place. Memory that is never written takes no space."""
_TRIES: Final = 20
_LARGEST: Final = 1 << 26  # maximum bytes that a reader reads


class Unreadable(Exception):
    """A page that a reader of this version cannot read; the text says why."""


class Shown(NamedTuple):
    """A page as read. `picture` is empty before the first picture."""

    version: str
    about: dict[str, Any]
    picture: dict[str, Any]


class Page:
    """The page of this process, for one writing thread.

    Attributes:
        descriptor: descriptor of the memory; open as long as the page exists.
    """

    def __init__(
        self, about: Mapping[str, Any], version: str, *, name: str = NAME, room: int = PICTURE
    ) -> None:
        """`about`: the description. `name`: name of the memory. `room`: bytes of each of its places.

        Raises `OSError` if there is no memory for it.
        """
        described = json.dumps(about).encode()
        self._room = room
        self._places = -(-(_HEADER + len(described)) // 8) * 8
        size = self._places + 2 * room
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.fchmod(self.descriptor, 0o600)
            os.ftruncate(self.descriptor, size)
            self._memory = mmap.mmap(self.descriptor, size)
        except OSError:
            os.close(self.descriptor)
            raise
        memory = self._memory
        memory[_HEADER : _HEADER + len(described)] = described
        memory[_ROOM : _ROOM + 4] = room.to_bytes(4, "little")
        memory[_VERSION] = version.encode()[:32].ljust(32, b"\0")
        self._view = memoryview(memory)
        self._latest = self._view[_LATEST : _LATEST + 8].cast("Q")
        self._lengths = self._view[_LENGTHS : _LENGTHS + 8].cast("I")
        memory[: _FIXED.size] = _FIXED.pack(_MAGIC, LAYOUT, len(described))  # last: it makes the page valid

    def show(self, picture: Mapping[str, Any]) -> bool:
        """Publish a picture; return False if it is too large, and the old one stays."""
        text = json.dumps(picture).encode()
        if len(text) > self._room:
            return False
        number = self._latest[0] + 1
        place, start = number % 2, self._places + number % 2 * self._room
        self._view[start : start + len(text)] = text
        self._lengths[place] = len(text)
        self._latest[0] = number  # one aligned store
        return True

    def close(self) -> None:
        """Remove the page; no method may be called afterwards."""
        for view in (self._latest, self._lengths, self._view):
            view.release()
        self._memory.close()
        os.close(self.descriptor)


def read(descriptor: int) -> Shown:
    """Read the page behind a file descriptor. Raises `Unreadable`, or `OSError` of the system.

    Its content may be anything: another program may have a memfd of that name.
    """
    header = os.pread(descriptor, _HEADER, 0)
    if len(header) < _HEADER or header[:8] != _MAGIC:
        raise Unreadable("it is not a status page of mcr_plus")
    _, layout, length = _FIXED.unpack_from(header)
    version = header[_VERSION].rstrip(b"\0").decode("ascii", "replace")
    if layout != LAYOUT:
        raise Unreadable(
            f"it is of mcr_plus {version}, whose status pages have form {layout}, and this command reads "
            f"form {LAYOUT}: use the mcr-plus of the job's environment"
        )
    room = int.from_bytes(header[_ROOM : _ROOM + 4], "little")
    if max(room, length) > _LARGEST:
        raise Unreadable("its header makes no sense")
    about = _parsed(os.pread(descriptor, length, _HEADER))
    places = -(-(_HEADER + length) // 8) * 8
    for _ in range(_TRIES):
        header = os.pread(descriptor, _HEADER, 0)
        number = int.from_bytes(header[_LATEST : _LATEST + 8], "little")
        if number == 0:
            return Shown(version, about, {})
        at = _LENGTHS + 4 * (number % 2)
        text = os.pread(
            descriptor, min(room, int.from_bytes(header[at : at + 4], "little")), places + number % 2 * room
        )
        # The writer reuses this place once the next picture is complete.
        if os.pread(descriptor, 8, _LATEST) == header[_LATEST : _LATEST + 8]:
            return Shown(version, about, _parsed(text))
        time.sleep(0.001)
    raise Unreadable("it changes faster than it can be read")


def read_at(path: str) -> Shown:
    """Read the page behind a path such as `/proc/PID/fd/N`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return read(descriptor)
    finally:
        os.close(descriptor)


def page_of(process: int) -> Shown | None:
    """Return the page of a rank, given its process on this host; None if no page can be read."""
    with contextlib.suppress(OSError):
        folder = f"/proc/{process}/fd"
        for name in os.listdir(folder):
            with contextlib.suppress(OSError, Unreadable, KeyError, TypeError, ValueError, IndexError):
                if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{NAME} "):
                    shown = read_at(f"{folder}/{name}")
                    if shown.about["processes"][shown.about["rank"]][0] == process:
                        return shown
    return None


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"it is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Unreadable("it is not a JSON object")
    return found
