"""`mcr.dump`: a Flight Recorder dump of this rank."""

from __future__ import annotations

import os

from mcr_plus.job.init import current
from mcr_plus.observe.hook import current_recorder


def dump(path: str | os.PathLike[str]) -> str:
    """Write this rank's last operations in the format of torch's Flight Recorder; return the file's path.

    Not collective; may be called in any thread at any time, also while an operation hangs. Each rank that
    calls it writes its own files: `<path><rank>`, a pickle for `torchfrtrace` and similar tools, and
    a JSON file with the same content for `mcr-plus diagnose`. A path that ends with `/` or names a folder is
    completed by `rank_`. Missing folders are created, existing files are replaced atomically.

    A dump has the last 2,000 collectives of each open group (`observe: {ring: N}`), the sends and receives
    in flight, the Python frames of operations that failed, that the program waits for now or waited for
    longer than a second, and the current frames of each thread of the program.

    With `observe: {dump: FOLDER}` or the variable MCR_DUMP, all ranks of all hosts also write dumps to that
    folder when an operation fails, on SIGUSR2 to any rank, and for `mcr-plus top --dump`.

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
