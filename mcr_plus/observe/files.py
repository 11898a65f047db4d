"""Dump files: their paths, and how they are written."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mcr_plus.errors import ConfigError, InvalidArgument, McrError
from mcr_plus.observe.options import dump_folder_of

if TYPE_CHECKING:
    from mcr_plus.config.schema import Config

PREFIX: Final = "rank_"
"""File name prefix if the path is only a folder."""


class DumpFiles(NamedTuple):
    """The dump files of one rank: `record` for torch's tools, and `text`, the same content as JSON."""

    record: Path
    text: Path


def files_of(path: str | os.PathLike[str], rank: int) -> DumpFiles:
    """Return the files of a rank for `mcr.dump(path)`: `<path><rank>`, and a JSON file next to it.

    The name of the JSON file must not contain the prefix: torch's tools read every file of a folder whose
    name contains it. `dumps/rank_` gives `dumps/rank_0` and `dumps/rank.0.json`; a folder gives the same.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or "\0" in text:
        raise InvalidArgument(f"path: expected the path of a file, got {path!r}")
    if not text or text.endswith(os.sep) or os.path.isdir(text):
        text = os.path.join(text, PREFIX)
    folder, prefix = os.path.split(text)
    stem = prefix.rstrip("_-.")
    name = f"{rank}.json" if stem in ("", prefix) else f"{stem}.{rank}.json"
    return DumpFiles(Path(folder, f"{prefix}{rank}"), Path(folder, name))


def default_folder() -> str:
    """Return the default folder for dumps: private to its owner, in the system's temporary folder."""
    return os.path.join(tempfile.gettempdir(), f"mcr_plus-dumps-{os.getuid()}")


def make_private(folder: str) -> None:
    """Create the folder of `default_folder`, in a place where other users may write.

    Raises `McrError` if it belongs to another user, who could read or replace its files.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    status = os.lstat(folder)
    if status.st_uid != os.getuid() or not os.path.isdir(folder) or os.path.islink(folder):
        raise McrError(f"{folder!r} is not a folder of this user; set MCR_DUMP to another one")


def write_dump(files: DumpFiles, record: dict[str, Any]) -> None:
    """Write a dump so that only complete files ever exist; raises `OSError`."""
    files.record.parent.mkdir(parents=True, exist_ok=True)
    _write(files.text, json.dumps(record, separators=(",", ":")).encode())
    _write(files.record, pickle.dumps(record))


def _write(path: Path, content: bytes) -> None:
    # Torch's tools read every file with the prefix in its name, so the partial file's name omits it.
    # Unlike with `tempfile`, the umask of the process decides who may read the file.
    partial = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with open(partial, "xb") as file:
            file.write(content)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def check_folder(config: Config) -> None:
    """Raise `ConfigError` if dumps cannot be written to their folder; create the folder if it is missing."""
    folder, place = dump_folder_of(config)
    if folder is not None:
        check_writable(folder, place)


def check_writable(folder: str, place: str) -> None:
    """Create a folder if it is missing; raise `ConfigError`, with `place`, if it cannot be written."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        text = f"{place}: expected a folder that can be written, got {folder!r}: {reason}"
        raise ConfigError(text) from None
