"""Files of recordings, one per rank, from which `mcr-plus report` makes its page: columns of numbers."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mcr_plus.api.record import Record
from mcr_plus.errors import ConfigError, InvalidArgument

FORMAT: Final = 2
TEXTS: Final = ("kind", "tag", "group", "backend", "codec", "dtype", "error")
"""Columns of texts, which are stored as numbers of entries in lists."""
NUMBERS: Final[Mapping[str, str]] = {
    "sequence": "i8", "bytes": "i8", "wire_bytes": "i8", "fused": "i4", "ranks": "i4",
    "t_issue": "f8", "t_done": "f8", "waited": "f8", "is_async": "?",
}  # fmt: skip
_EXPECTED: Final = "expected a file that mcr.record(path) wrote"
_ABOUT: Final[Mapping[str, type | tuple[type, ...]]] = {
    "job": str, "rank": int, "size": int, "host": str, "hosts": list, "epoch_us": (int, float),
    "began": (int, float), "ended": (int, float), "names": dict, "choices": list, "config": dict,
    "versions": dict,
}  # fmt: skip
_MOST_BYTES: Final = 1 << 32


@dataclass(frozen=True)
class Recording:
    """What one rank has recorded.

    Times are seconds of its host's clock (`time.perf_counter()`).

    Attributes:
        about: job (a name), rank, size, host, hosts (of all ranks), epoch_us (time of day at 0 of the clock),
            began, ended, names (of each column of texts, its entries), choices (see `expectations`), config,
            versions.
        steps: the ends of the steps of an optimizer.
        columns: of every operation; those of texts have indices into `names`, -1 for none.
    """

    path: Path
    about: Mapping[str, Any]
    steps: NDArray[np.float64]
    columns: Mapping[str, NDArray[Any]]

    @property
    def rank(self) -> int:
        """The rank in the job."""
        return int(self.about["rank"])

    @property
    def count(self) -> int:
        """The number of operations."""
        return len(self.columns["t_issue"])


def file_of(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank{rank}.npz"


def prepare_folder(folder: str | os.PathLike[str]) -> Path:
    """Create a folder for recordings; raises `InvalidArgument` if nothing can be written there."""
    try:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):  # ranks on several hosts may have one folder and one pid
            return path
    except OSError as error:
        raise InvalidArgument(f"record: cannot write into {str(folder)!r}: {error.strerror}") from None
    except (TypeError, ValueError):
        raise InvalidArgument(f"record: expected the path of a folder, got {folder!r}") from None


def save_recording(
    path: Path, records: Sequence[Record], steps: Sequence[float], about: Mapping[str, Any]
) -> None:
    """Write a file, as a whole; raises `OSError` if that fails. `about`: see `Recording`, without `names`."""
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
    """Read a file. Raises `ConfigError` if it cannot be read, is truncated, or of another version."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a FIFO may have no writer
            raise ConfigError(f"{path}: cannot read: not a regular file; {_EXPECTED}")
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path}: larger than {_MOST_BYTES >> 30} GiB; {_EXPECTED}")
        with path.open("rb") as file:
            stored = np.load(file, allow_pickle=False)
            arrays = {name: stored[name] for name in stored.files} if hasattr(stored, "files") else {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror or error}") from None
    except (ValueError, EOFError, KeyError, zlib.error, zipfile.BadZipFile):
        raise ConfigError(f"{path}: truncated, or of another kind; {_EXPECTED}") from None
    if "about" not in arrays:
        raise ConfigError(f"{path}: {_EXPECTED}")
    try:
        about = json.loads(arrays.pop("about").tobytes())
        version = about["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{path}: about: malformed; {_EXPECTED}") from None
    if version != FORMAT:
        raise ConfigError(f"{path}: of another version of mcr_plus: format {version!r}; expected {FORMAT}")
    _check(path, about, arrays)
    return Recording(path, about, arrays.pop("steps"), arrays)


def _check(path: Path, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Raise `ConfigError` for a field or a column that is missing, or not what it should be."""
    for name, kind in _ABOUT.items():
        if not isinstance(about.get(name), kind):
            raise ConfigError(f"{path}: {name}: missing or malformed; {_EXPECTED}")
    dtypes = {**dict.fromkeys(TEXTS, "i4"), **NUMBERS, "steps": "f8"}
    length = len(arrays["t_issue"]) if "t_issue" in arrays else 0
    for name, dtype in dtypes.items():
        column = arrays.get(name)
        good = column is not None and column.ndim == 1 and column.dtype == np.dtype(dtype)
        if not good or column is None or (name != "steps" and len(column) != length):
            raise ConfigError(f"{path}: column {name!r} is missing or malformed; {_EXPECTED}")
        known = about["names"].get(name, []) if name in TEXTS else None
        if known is not None and length and not -1 <= int(column.min()) <= int(column.max()) < len(known):
            raise ConfigError(f"{path}: column {name!r} has entries without a name; {_EXPECTED}")
