"""Every error mcr_plus raises, and how their texts quote values and unknown names.

Ranks in texts and attributes are ranks of the job (`Group.named`), whatever the group of the operation.

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
│   ├── SyncClosed         no weights follow: the sources of `mcr.sync` have closed it
│   └── Revoked            belongs to a world that has been replaced, without the lost ranks or with new ones
├── CommTimeout        names op, sequence, group, backend, missing ranks
├── OrderMismatch      ranks issued different ops: names both
├── ResultMismatch     ranks hold different results of an operation
├── DataCorrupted      what arrived is not what was sent: names the ranks, the library and the block
└── LaunchError
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Final

_PASSED_ON: Final = 60  # ranks at most that a record for other ranks holds
_CLOSE: Final = 0.65
"""Share of letters in common, by difflib, of names of which one may be meant for the other: `mip` and `mpi`,
but not `onebit` and `none`."""


class McrError(RuntimeError):
    """Base of all errors raised by mcr_plus; programs for torch.distributed catch its RuntimeError."""

    passed_on = ""  # the text of another rank's error, where this error only relays that one


class ConfigError(McrError):
    """A configuration, table or algorithm file is wrong; the message begins with `file:line: path:`."""


class AlgorithmError(ConfigError):
    """An algorithm was refused; a line for everything found, each beginning with `file:line: place:`."""


class NotInitialized(McrError):
    """`init` has not been called, or `finalize` has been called since."""


class AlreadyInitialized(NotInitialized):
    """`init` was called again without `finalize`.

    A `NotInitialized`, as which earlier releases raised it.
    """


class Unsupported(McrError):
    """An argument, dtype, reduce op or option that is not supported; the message names those that are."""


class InvalidArgument(Unsupported, ValueError):
    """An argument that makes no sense: a wrong shape, rank, split or type."""


class BackendError(McrError):
    """A communication library failed or a peer died."""


class BackendUnavailable(BackendError):
    """A requested backend cannot run here; the message has the remedy."""


class PeerLost(BackendError):
    """Ranks that an operation needs have died, are stopped, or are out of reach.

    Attributes:
        ranks: these ranks, as ranks of the job.
        operation: the operation that cannot complete, as messages describe it.
        group: the name of its group.
        seen: what was seen: `process has died`, `stopped`, `no heartbeat for 0.8 s`.
    """

    def __init__(
        self, text: str, ranks: Sequence[int] = (), operation: str = "", group: str = "", seen: str = ""
    ) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)
        self.operation = operation
        self.group = group
        self.seen = seen
        # The ranks first: a record on the board may be cut.
        self.passed_on = f"{type(self).__name__} {list(self.ranks[:_PASSED_ON])}: {text}"

    def again(self, text: str) -> PeerLost:
        """The same loss as the error of something else."""
        return PeerLost(text, self.ranks, self.operation, self.group, self.seen)


class Revoked(BackendError):
    """A communicator, handle or model hook of a world that another one has replaced; see `mcr.shrink`.

    Also what a rank raises that the others have declared lost, and have gone on without.
    """


class SyncClosed(BackendError):
    """`pull` has nothing more to expect: the sources of `mcr.sync` have closed it, or their job has ended.

    The normal end of a receiver. Every version that had come whole by then has been pulled.
    """


class CommTimeout(McrError):
    """An operation passed its deadline; the message names the ranks that have not arrived.

    `missing`: those, as ranks of the job, also for an operation of another group than the world.
    """

    def __init__(self, text: str, missing: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.missing = tuple(missing)


class OrderMismatch(McrError):
    """Ranks of a group issued different operations under the same sequence number."""


class OperationsDiffer(OrderMismatch):
    """A library has found that ranks issued different operations.

    `explained`: the text has both operations; otherwise the engine finds them out.
    """

    def __init__(self, text: str, *, explained: bool = False) -> None:
        super().__init__(text)
        self.explained = explained


class ResultMismatch(McrError):
    """An audit found that ranks hold different results of an operation."""


class DataCorrupted(McrError):
    """The payload of an operation has changed on its way or in memory, see `dispatch: {verify: every}`.

    Attributes:
        operation: as messages describe it.
        rank: that holds the damaged payload, as a rank of the job.
        source: the rank of the job that the payload is from; `rank` itself where its own copy has changed.
        library: that ran the operation.
        block: number of the first 64 KiB that differ, in what `source` has sent to `rank`; None if unknown.
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
        # The ranks first: a record on the board may be cut.
        facts = json.dumps([rank, source, library, block, group, operation])
        self.passed_on = f"{type(self).__name__} {facts}: {text}"

    @classmethod
    def relayed(cls, passed_on: str, text: str) -> DataCorrupted | None:
        """The same finding as the error of another rank, with this text; None for any other record."""
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
    """The error, with this text, of what cannot run because of `error`: a loss of peers stays one."""
    return error.again(text) if isinstance(error, PeerLost) else BackendError(text)


def phrase_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 2, 5`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def unknown(what: str, value: object, known: Sequence[str]) -> str:
    """Phrase an unknown name: the bad value, the known ones, and the one that was probably meant."""
    return f"unknown {what} {in_yaml(value)}; known: {', '.join(known)}{hint(value, known)}"


def hint(value: object, known: Sequence[str]) -> str:
    """Ask for the known name that was probably meant by `value`, or return an empty text."""
    meant = _meant(value, known) if isinstance(value, str) else None
    return f"; did you mean {meant!r}?" if meant else ""


def _meant(value: str, known: Sequence[str]) -> str | None:
    """Return the known name that was probably meant.

    That is the only one that begins with `value`, such as `int8_block` for `int8`, or ends with it after a
    `_`, such as `get_rank` for `rank`; else the closest one.
    """
    names = {name.casefold(): name for name in known}
    text = value.casefold()
    longer = [name for name in names if text and (name.startswith(text) or name.endswith(f"_{text}"))]
    close = longer if len(longer) == 1 else difflib.get_close_matches(text, names, n=1, cutoff=_CLOSE)
    return names[close[0]] if close else None


def in_yaml(value: object) -> str:
    """As `short`, with the words of YAML for a bool: whoever wrote `yes` has not seen `True`."""
    words = {True: "true, yes or on", False: "false, no or off"}
    return f"{value} ({words[value]} in YAML)" if isinstance(value, bool) else short(value)


def short(value: object) -> str:
    """Write a value as an error quotes it: its repr, cut at 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_normal_end(error: object) -> bool:
    """Whether a `with` block that ends with `error` ends in order: with None, or `sys.exit` for success."""
    return error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
