"""`mcr.dump`: a Flight Recorder dump of this rank."""

from __future__ import annotations

import os

from mcr_plus.job.init import current
from mcr_plus.observe.hook import current_recorder


def dump(path: str | os.PathLike[str]) -> str:
    """Write this rank's last operations in the format of torch's Flight Recorder; returns the file's path.

    Not collective, and allowed in any thread at any time, also while an operation hangs. Each rank that
    calls it writes a file of its own: `<path><rank>`, a pickle for `torchfrtrace` and tools of its kind, and
    the same as JSON beside it, for `mcr-plus diagnose`. A path that ends with `/`, or names a folder, is
    completed by `rank_`; folders that are missing are made. Files that exist are replaced, at once.

    A dump has the last 2,000 collectives of each group that is open (`observe: {ring: N}`), the sends and
    receives in flight, and the Python frames of operations that are waited for, have been waited for for
    more than a second, or have failed; also where each thread of the program is.

    With `observe: {dump: FOLDER}` or the variable MCR_DUMP, dumps are also written to that folder when an
    operation fails, on SIGUSR2 to any rank, and by `mcr-plus top --dump`, by all ranks of all hosts.

    Raises:
        NotInitialized: there is no job.
        McrError: the file cannot be written.

    Example:
        ```python
        mcr.all_reduce(torch.ones(4))
        path = mcr.dump("dumps/rank_")  # dumps/rank_0 and dumps/rank.0.json on rank 0
        ```
    """
    current()  # raises without a job
    return current_recorder().dump(path)
