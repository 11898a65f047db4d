"""Recording files, one per rank, with columns of numbers; `mcr-plus report` makes its page from them."""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mcr_plus.config.document import path_text
from mcr_plus.errors import ConfigError, InvalidArgument, short
from mcr_plus.observe.record import Record

FORMAT: Final = 3
TEXTS: Final = ("kind", "tag", "group", "backend", "codec", "sums", "dtype", "error")
"""Columns of texts, stored as indices into lists of texts."""
NUMBERS: Final[Mapping[str, str]] = {
    "sequence": "i8", "bytes": "i8", "wire_bytes": "i8", "fused": "i4", "ranks": "i4",
    "t_issue": "f8", "t_done": "f8", "waited": "f8", "is_async": "?",
}  # fmt: skip
_EXPECTED: Final = "expected a file that mcr.record(path) wrote"
_MOST_BYTES: Final = 1 << 32
_MOST_TIMES: Final = 32  # columns compress to an eighth; a crafted file of 600 bytes may claim any length
_ROOM: Final = 1 << 26
_HEADER: Final = re.compile(
    rb"\{'descr': '([^']{1,9})', 'fortran_order': False, 'shape': \(([0-9]{1,12}),\), \} *\n"
)
_DTYPES: Final[Mapping[str, str]] = {
    "steps": "f8", **dict.fromkeys(TEXTS, "i4"), **NUMBERS,
}  # fmt: skip
_LARGEST: Final = 1e18  # largest time, as in traces: sums stay finite

_Time = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]


class _RecordPart(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Expected(_RecordPart):
    expected_us: _Time | None = None
    alternatives: dict[str, _Time] = {}


class _Choice(_RecordPart):
    kind: str
    tag: str | None
    backend: str
    bytes: int
    count: int = Field(ge=1)
    job: _Expected
    usual: _Expected


class _About(_RecordPart):
    job: str
    rank: int = Field(ge=0)
    size: int = Field(ge=1)
    host: str
    hosts: list[str]
    epoch_us: _Time
    began: _Time
    ended: _Time
    names: dict[str, list[str]]
    choices: list[_Choice]
    config: dict[str, Any]
    versions: dict[str, str]


@dataclass(frozen=True)
class Recording:
    """The recording of one rank.

    Times are seconds of its host's clock (`time.perf_counter()`).

    Attributes:
        about: job (a name), rank, size, host, hosts (of all ranks), epoch_us (time of day at 0 of the clock),
            began, ended, names (the entries of each text column), choices (see `expectations`), config,
            versions.
        steps: the times at which an optimizer's steps ended.
        columns: the data of all operations; text columns hold indices into `names`, -1 for none.
    """

    path: Path
    about: Mapping[str, Any]
    steps: NDArray[np.float64]
    columns: Mapping[str, NDArray[Any]]

    @property
    def rank(self) -> int:
        """Return the rank in the job."""
        return int(self.about["rank"])

    @property
    def count(self) -> int:
        """Return the number of operations."""
        return len(self.columns["t_issue"])


def file_of(folder: Path, rank: int) -> Path:
    """Return the path of a rank's file."""
    return folder / f"rank{rank}.npz"


def prepare_folder(folder: str | os.PathLike[str]) -> Path:
    """Create a folder for recordings; raise `InvalidArgument` if it cannot be written."""
    try:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):  # random name: hosts may share the folder, and pids repeat
            return path
    except OSError as error:
        raise InvalidArgument(f"record: cannot write into {str(folder)!r}: {error.strerror}") from None
    except (TypeError, ValueError):
        raise InvalidArgument(f"record: expected the path of a folder, got {folder!r}") from None


def save_recording(
    path: Path, records: Sequence[Record], steps: Sequence[float], about: Mapping[str, Any]
) -> None:
    """Write a file atomically; raise `OSError` if that fails. `about`: see `Recording`, without `names`."""
    columns: dict[str, NDArray[Any]] = {}
    names: dict[str, list[str]] = {}
    for name in TEXTS:
        numbers: dict[str | None, int] = {None: -1}
        values = [getattr(record, name) for record in records]
        for value in values:
            if value not in numbers:
                numbers[value] = len(numbers) - 1
        columns[name] = np.fromiter((numbers[value] for value in values), np.int32, len(values))
        names[name] = [text for text in numbers if text is not None]
    for name, dtype in NUMBERS.items():
        columns[name] = np.fromiter((getattr(record, name) for record in records), dtype, len(records))
    text = json.dumps({"format": FORMAT, **about, "names": names})
    columns["about"] = np.frombuffer(text.encode(), np.uint8)
    columns["steps"] = np.array(steps, np.float64)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            np.savez_compressed(file, **columns)  # type: ignore[arg-type]  # an array may have any name
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_recording(path: Path) -> Recording:
    """Read a file. Raises `ConfigError` if it is unreadable, truncated, or of another version."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a FIFO without a writer would hang
            raise ConfigError(f"{path}: cannot read: not a regular file; {_EXPECTED}")
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise ConfigError(f"{path}: larger than {_MOST_BYTES >> 30} GiB; {_EXPECTED}")
        with path.open("rb") as file, ZipFile(file) as archive:
            _check_room(path, archive, _ROOM + _MOST_TIMES * size)
            about = _about(path, _column(path, archive, "about", "u1"))
            columns = {name: _column(path, archive, name, dtype) for name, dtype in _DTYPES.items()}
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror or error}") from None
    except (ValueError, EOFError, RuntimeError, struct.error, zlib.error, BadZipFile):
        # RuntimeError: encrypted, or compressed by a method that this Python lacks
        raise ConfigError(f"{path}: truncated, or of another kind; {_EXPECTED}") from None
    _check(path, about, columns)
    return Recording(path, about, columns.pop("steps"), columns)


def _check_room(path: Path, archive: ZipFile, most: int) -> None:
    """Raise `ConfigError` for more than `most` bytes. Checks the real size: stated sizes may be wrong."""
    if any(each.compress_type not in (ZIP_STORED, ZIP_DEFLATED) for each in archive.infolist()):
        raise BadZipFile
    stated = sum(info.file_size for info in archive.infolist())
    if stated > most:
        raise ConfigError(f"{path}: {stated:,} bytes of columns, more than such a file has; {_EXPECTED}")


def _about(path: Path, column: NDArray[Any]) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads(column.tobytes())
        version = about["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{path}: about: malformed; {_EXPECTED}") from None
    if version != FORMAT:
        raise ConfigError(
            f"{path}: of another version of mcr_plus: format {short(version)}; expected {FORMAT}"
        )
    return about


def _column(path: Path, archive: ZipFile, name: str, dtype: str) -> NDArray[Any]:
    """Read one column; raises `ConfigError` unless it has one dimension, this dtype and its stated length."""
    try:
        with archive.open(f"{name}.npy") as member:
            start = member.read(10)
            header = _HEADER.fullmatch(member.read(int.from_bytes(start[8:], "little")))
            content = member.read()
    except KeyError:
        raise ConfigError(f"{path}: column {name!r} is missing or malformed; {_EXPECTED}") from None
    known = np.dtype(dtype)
    if (
        header is None
        or start[:8] != b"\x93NUMPY\x01\x00"
        or header[1].decode() != known.str
        or int(header[2]) * known.itemsize != len(content)
    ):
        raise ConfigError(f"{path}: column {name!r} is missing or malformed; {_EXPECTED}")
    return np.frombuffer(content, known)


def _check(path: Path, about: Mapping[str, Any], columns: Mapping[str, NDArray[Any]]) -> None:
    """Raise `ConfigError` for an invalid field or column."""
    try:
        found = _About.model_validate(about)
    except ValidationError as error:
        keys = error.errors(include_url=False)[0]["loc"]
        raise ConfigError(f"{path}: {path_text(keys)}: missing or malformed; {_EXPECTED}") from None
    if len(found.hosts) != found.size or found.rank >= found.size:
        what = f"rank {found.rank} of {short(found.size)} ranks on {len(found.hosts)} hosts"
        raise ConfigError(f"{path}: {what}; {_EXPECTED}")
    for name in TEXTS:
        known, column = found.names.get(name, []), columns[name]
        if len(column) and not -1 <= int(column.min()) <= int(column.max()) < len(known):
            raise ConfigError(f"{path}: column {name!r} has entries without a name; {_EXPECTED}")
    for name, least in (("ranks", 1), ("sequence", 0), ("bytes", 0), ("wire_bytes", 0), ("fused", 0)):
        if len(columns[name]) and (lowest := int(columns[name].min())) < least:
            raise ConfigError(
                f"{path}: column {name!r} has {lowest}, expected numbers from {least}; {_EXPECTED}"
            )
    for name, column in columns.items():
        if name != "steps" and len(column) != len(columns["t_issue"]):
            raise ConfigError(f"{path}: column {name!r} is missing or malformed; {_EXPECTED}")
        if column.dtype.kind == "f" and not (np.abs(column) <= _LARGEST).all():
            raise ConfigError(f"{path}: column {name!r} has values that are no times; {_EXPECTED}")
