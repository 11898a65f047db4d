"""Samples of `tune`, and the file in which they are stored.

The file has one JSON document per line: first the fingerprint of the job, then the samples. A sample is
written as soon as it is known, so that a run can continue after an interruption or the end of its budget.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mcr_plus.config.document import read_bytes
from mcr_plus.core.kinds import Kind
from mcr_plus.core.units import MAX_INTEGER
from mcr_plus.errors import ConfigError, short
from mcr_plus.tables.fingerprint import Fingerprint, differences
from mcr_plus.tables.statistics import Timing
from mcr_plus.tuning.operations import DTYPE_BY_NAME, BenchCase

_VERSION: Final = 1
_MOST_BYTES: Final = 1 << 28


@dataclass(frozen=True)
class Sample:
    """Timing of a case with one candidate; `timing` is None if `problem` excluded the candidate.

    `overlap`: the timing is the exposed time of an asynchronous operation beside a computation, not the whole
    time.
    """

    case: BenchCase
    candidate: str
    overlap: bool
    timing: Timing | None
    problem: str | None = None

    def document(self) -> dict[str, Any]:
        """Return plain data from which `from_document` restores the sample."""
        timing = None if self.timing is None else asdict(self.timing)
        rest = {"way": self.candidate, "overlap": self.overlap, "timing": timing, "problem": self.problem}
        return {**asdict(self.case), **rest}

    @classmethod
    def from_document(cls, data: Mapping[str, Any]) -> Sample:
        """Restore a sample from `document`. Raises `KeyError` or `TypeError` for other data."""
        case = BenchCase(data["kind"], data["nbytes"], data["dtype"], data["async_op"])
        timing = None if data["timing"] is None else Timing(**data["timing"])
        return cls(case, data["way"], data["overlap"], timing, data["problem"])


def median_of_repeats(samples: Iterable[Sample]) -> list[Sample]:
    """Return one sample for each candidate of each case: the sample with the median p50.

    Of an even number of samples it is the lower of the two in the middle, because disturbances only add time.
    """
    apart: dict[tuple[BenchCase, str, bool], list[Sample]] = {}
    for sample in samples:
        apart.setdefault((sample.case, sample.candidate, sample.overlap), []).append(sample)
    return [_middle(found) for found in apart.values()]


def _middle(samples: Sequence[Sample]) -> Sample:
    """Return the median sample; a sample without a timing takes precedence."""
    timed = sorted((timing.p50, index) for index, each in enumerate(samples) if (timing := each.timing))
    excluded = (sample for sample in samples if sample.timing is None)
    return next(excluded, None) or samples[timed[(len(timed) - 1) // 2][1]]


class MeasurementFile:
    """Samples of one tuning run on disk. Used on rank 0 only."""

    def __init__(self, path: Path, fingerprint: Fingerprint, *, fresh: bool) -> None:
        """Open `path`, keeping its samples unless `fresh`.

        Raises `ConfigError` if the file cannot be read or written, or has another fingerprint.
        """
        self.samples: list[Sample] = []
        self._path = path
        head = {"version": _VERSION, "fingerprint": {name: list(v) for name, v in fingerprint.items()}}
        try:
            if path.exists() and not path.is_file():  # opening a FIFO would block
                raise ConfigError(f"{path}: expected a regular file")
            if not fresh and path.exists():
                self.samples = _read(path, fingerprint)
            # The file is replaced atomically, so that an interrupted run cannot lose samples of earlier runs.
            draft = path.with_name(f"{path.name}.{os.getpid()}")
            documents = [head, *(sample.document() for sample in self.samples)]
            draft.write_text("".join(f"{json.dumps(each)}\n" for each in documents))
            draft.replace(path)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None

    def add(self, samples: Iterable[Sample]) -> None:
        """Append samples, in memory and on disk."""
        with self._path.open("a") as file:
            for sample in samples:
                self.samples.append(sample)
                file.write(f"{json.dumps(sample.document())}\n")


class _SamplePart(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


_Microseconds = Annotated[float, Field(ge=1e-6, le=1e15)]


class _Timing(_SamplePart):
    p20: _Microseconds
    p50: _Microseconds
    p80: _Microseconds
    low: _Microseconds
    high: _Microseconds
    samples: int = Field(ge=1, lt=MAX_INTEGER)


class _Sample(_SamplePart):
    kind: Kind
    nbytes: int = Field(ge=0, lt=MAX_INTEGER)
    dtype: str
    async_op: bool
    way: str
    overlap: bool
    timing: _Timing | None
    problem: str | None


class _Head(_SamplePart):
    version: int
    fingerprint: dict[str, tuple[str, ...]]


def _read(path: Path, fingerprint: Fingerprint) -> list[Sample]:
    content = read_bytes(path, str(path), most=_MOST_BYTES)
    lines = content.decode(errors="replace").splitlines()
    try:
        head = _Head.model_validate_json(lines[0])
    except (ValidationError, IndexError):
        raise ConfigError(f"{path}:1: not a file of measurements; name another with --measurements") from None
    different = differences(head.fingerprint, fingerprint)
    if head.version != _VERSION or different:
        what = "; ".join(different) or f"unknown version {short(head.version)}; known: {_VERSION}"
        raise ConfigError(
            f"{path}: measured elsewhere ({what}); name another file with --measurements, or use --fresh"
        )
    samples = [_sample_of(line) for line in lines[1:]]
    if samples and samples[-1] is None:
        samples.pop()  # the run was killed while it wrote this line
    for number, sample in enumerate(samples, 2):
        if sample is None:
            raise ConfigError(
                f"{path}:{number}: not a measurement; name another file with --measurements, or use --fresh"
            )
    return [sample for sample in samples if sample is not None]


def _sample_of(line: str) -> Sample | None:
    try:
        found = _Sample.model_validate_json(line)
    except ValidationError:
        return None
    return Sample.from_document(found.model_dump()) if found.dtype in DTYPE_BY_NAME else None
