"""Errors of mcr_plus, and functions that phrase values and unknown names in their texts.

Ranks in texts and attributes are always ranks of the job (`Group.named`), not of the operation's group.

McrError
├── ConfigError        YAML, tables, algorithm files: always with file and place
│   └── AlgorithmError    an algorithm that would hang, race or compute something else
├── NotInitialized
│   └── AlreadyInitialized   `init` was called again
├── Unsupported        an op, dtype or option that a backend or codec cannot do
│   └── InvalidArgument   also a ValueError: an argument that no backend could take
├── BackendError       the library failed: its own message, op, sequence, backend
│   ├── BackendUnavailable
│   ├── PeerLost           ranks have died, are stopped or out of reach: names them
│   ├── SyncClosed         no more weights: the sources of `mcr.sync` have closed it
│   └── Revoked            use of a world that has been replaced, without lost ranks or with new ranks
├── CommTimeout        names op, sequence, group, backend, missing ranks
├── OrderMismatch      ranks issued different ops: names both
├── ResultMismatch     ranks hold different results of an operation
├── DataCorrupted      received data differs from the sent data: names ranks, library and block
└── LaunchError
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Final

_PASSED_ON: Final = 60  # most ranks listed in a record for other ranks
_CLOSE: Final = 0.65
"""Similarity (difflib) from which a name may be a typo: `mip` of `mpi`, but not `onebit` of `none`."""


class McrError(RuntimeError):
    """Base of all errors of mcr_plus; a RuntimeError, because programs for torch.distributed catch that."""

    passed_on = ""  # text for other ranks, if it differs from this error's text


class ConfigError(McrError):
    """A configuration, table or algorithm file is wrong; the message begins with `file:line: path:`."""


class AlgorithmError(ConfigError):
    """An algorithm was refused; one line per finding, each beginning with `file:line: place:`."""


class NotInitialized(McrError):
    """`init` has not been called, or `finalize` has been called since."""


class AlreadyInitialized(NotInitialized):
    """`init` was called again without `finalize`.

    A subclass of `NotInitialized`, because earlier releases raised that.
    """


class Unsupported(McrError):
    """An argument, dtype, reduce op or option is not supported; the message names the supported ones."""


class InvalidArgument(Unsupported, ValueError):
    """An argument is invalid: a wrong shape, rank, split or type."""


class BackendError(McrError):
    """A communication library failed or a peer died."""


class BackendUnavailable(BackendError):
    """A requested backend cannot run here; the message names the remedy."""


class PeerLost(BackendError):
    """Ranks that an operation needs have died, are stopped, or are out of reach.

    Attributes:
        ranks: the lost ranks, as ranks of the job.
        operation: the operation that cannot complete, as messages describe it.
        group: the name of the operation's group.
        seen: the observation: `process has died`, `stopped`, `no heartbeat for 0.8 s`.
    """

    def __init__(
        self, text: str, ranks: Sequence[int] = (), operation: str = "", group: str = "", seen: str = ""
    ) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)
        self.operation = operation
        self.group = group
        self.seen = seen
        # Ranks come first, because a record on the board may be truncated.
        self.passed_on = f"{type(self).__name__} {list(self.ranks[:_PASSED_ON])}: {text}"

    def again(self, text: str) -> PeerLost:
        """Return the same loss with another text."""
        return PeerLost(text, self.ranks, self.operation, self.group, self.seen)


class Revoked(BackendError):
    """A communicator, handle or model hook belongs to a world that has been replaced; see `mcr.shrink`.

    Also raised on a rank that the other ranks have declared lost and continued without.
    """


class SyncClosed(BackendError):
    """`pull` gets no more versions: the sources of `mcr.sync` have closed it, or their job has ended.

    This is the normal end of a receiver. Every version received completely by then has been pulled.
    """


class CommTimeout(McrError):
    """An operation passed its deadline; the message names the missing ranks.

    `missing`: the missing ranks, as ranks of the job, also for operations of other groups.
    """

    def __init__(self, text: str, missing: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.missing = tuple(missing)


class OrderMismatch(McrError):
    """Ranks of a group issued different operations under the same sequence number."""


class OperationsDiffer(OrderMismatch):
    """A library found that ranks issued different operations.

    `explained`: True if the text names both operations; otherwise the engine adds them.
    """

    def __init__(self, text: str, *, explained: bool = False) -> None:
        super().__init__(text)
        self.explained = explained


class ResultMismatch(McrError):
    """An audit found that ranks hold different results of an operation."""


class DataCorrupted(McrError):
    """The payload of an operation was corrupted in transfer or in memory; see `dispatch: {verify: every}`.

    Attributes:
        operation: the operation, as messages describe it.
        rank: the rank of the job that holds the corrupted payload.
        source: the rank of the job that sent the payload; `rank` itself if its own copy has changed.
        library: the library that ran the operation.
        block: number of the first 64 KiB that differ in the data from `source` to `rank`; None if unknown.
        group: the name of the group.
    """

    def __init__(
        self,
        text: str,
        operation: str = "",
        rank: int | None = None,
        source: int | None = None,
        library: str = "",
        block: int | None = None,
        group: str = "",
    ) -> None:
        super().__init__(text)
        self.operation = operation
        self.rank, self.source = rank, source
        self.library = library
        self.block = block
        self.group = group
        # Ranks come first, because a record on the board may be truncated.
        facts = json.dumps([rank, source, library, block, group, operation])
        self.passed_on = f"{type(self).__name__} {facts}: {text}"

    @classmethod
    def relayed(cls, passed_on: str, text: str) -> DataCorrupted | None:
        """Return the error of another rank's finding, with this text; None for records of other errors."""
        name, _, rest = passed_on.partition(" ")
        if name != cls.__name__:
            return None
        try:
            (rank, source, library, block, group, operation), _ = json.JSONDecoder().raw_decode(rest)
        except ValueError:  # the record was cut
            return cls(text)
        return cls(text, operation, rank, source, library, block, group)


class LaunchError(McrError):
    """A job could not be started, or a rank of it failed."""


def following(error: BaseException, text: str) -> BackendError:
    """Return a follow-up error with this text: a `PeerLost` if `error` is one, else a `BackendError`."""
    return error.again(text) if isinstance(error, PeerLost) else BackendError(text)


def phrase_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 0, 2, 5`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def unknown(what: str, value: object, known: Sequence[str]) -> str:
    """Phrase an unknown name: the bad value, the known names, and the name probably meant."""
    return f"unknown {what} {in_yaml(value)}; known: {', '.join(known)}{hint(value, known)}"


def hint(value: object, known: Sequence[str]) -> str:
    """Return a question for the known name that `value` probably meant, or an empty text."""
    meant = _meant(value, known) if isinstance(value, str) else None
    return f"; did you mean {meant!r}?" if meant else ""


def _meant(value: str, known: Sequence[str]) -> str | None:
    """Return the known name that was probably meant.

    This is the only name that begins with `value`, such as `int8_block` for `int8`, or ends with `_` and
    `value`, such as `get_rank` for `rank`; else the closest name.
    """
    names = {name.casefold(): name for name in known}
    text = value.casefold()
    longer = [name for name in names if text and (name.startswith(text) or name.endswith(f"_{text}"))]
    close = longer if len(longer) == 1 else difflib.get_close_matches(text, names, n=1, cutoff=_CLOSE)
    return names[close[0]] if close else None


def in_yaml(value: object) -> str:
    """Write a value as `short` does, with the YAML words for a bool: users write `yes`, not `True`."""
    words = {True: "true, yes or on", False: "false, no or off"}
    return f"{value} ({words[value]} in YAML)" if isinstance(value, bool) else short(value)


def short(value: object) -> str:
    """Write a value as an error quotes it: its repr, cut at 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def expect(what: str, value: object, kind: type) -> None:
    """Raise `InvalidArgument` unless a value is an instance of a class."""
    if not isinstance(value, kind):
        raise InvalidArgument(f"{what}: {short(value)}; expected an object of class {kind.__name__}")


def is_normal_end(error: object) -> bool:
    """Return True if a `with` block ends in order: `error` is None, or `sys.exit` with success."""
    return error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
