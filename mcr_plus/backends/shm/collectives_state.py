"""The state of a direct collective, an array of int64 for `collectives_kernels`, and lines of a segment."""

from __future__ import annotations

from typing import Final

BARRIER: Final = 0
ALL_REDUCE: Final = 1
ALL_GATHER: Final = 2
ALL_TO_ALL: Final = 3
REDUCE_SCATTER: Final = 4
BROADCAST: Final = 5
REDUCE: Final = 6
GATHER: Final = 7
SCATTER: Final = 8
EXCHANGE: Final = 9  # each rank sends different data of uneven sizes to every other rank
SHARE: Final = 10  # each rank sends the same data of uneven sizes to all ranks that expect it
REDUCE_SCATTER_V: Final = 11
ALL_REDUCE_WHOLE: Final = 12  # every rank reduces all data: one exchange instead of two
UNEVEN: Final = (EXCHANGE, SHARE, REDUCE_SCATTER_V)

# Words of the state.
KIND: Final = 0
RANK: Final = 1
RANKS: Final = 2
LINES: Final = 3  # address of the ranks' lines
AREAS: Final = 4  # address of the areas
AREA: Final = 5  # bytes of a slot
RING: Final = 6
SPINS: Final = 7
YIELDS: Final = 8
BASE: Final = 9  # slices of all earlier operations
SLICES: Final = 10
PUT: Final = 11  # slices of this operation put, reduced and taken by this rank
REDUCED: Final = 12
TAKEN: Final = 13
SOURCE: Final = 14  # addresses
TARGET: Final = 15
COUNT: Final = 16  # elements: of the whole buffer for reductions and broadcast, else of a rank's block
WIDTH: Final = 17  # bytes of an element
SLICE: Final = 18  # elements of a slice
COMBINE: Final = 19  # addresses of kernels
DIVIDE: Final = 20
ROOT: Final = 21
STREAMS: Final = 22  # flag: `take` bypasses the caches
HEADER: Final = 23  # bytes, if sizes differ between ranks
AGREED: Final = 24  # flag: the number of slices is known
MISMATCH: Final = 25  # 1 + a rank that sends an unexpected count
TAG: Final = 26  # tag of the operation, equal on all ranks
BELLS: Final = 27
GIVEN: Final = 28  # elements that the rank of `MISMATCH` sends to this rank
SHARING: Final = 29  # NEVER, ALWAYS, or ASK for the verdicts of peers at the next operation
EXPOSES: Final = 30  # flag: peers read the data of this operation from this process's memory
UNREADABLE: Final = 31  # 1 + a rank whose memory could not be read in this operation
PROCESS: Final = 32  # of this rank
BOUNCE: Final = (
    33  # address of `CHUNK` bytes for data that is reduced, for results, and for each rank with `SUMS`
)
WAY: Final = 34  # how this operation hands its data to peers: COPIED, PAST_CACHES or IN_PLACE
FIRST: Final = 35  # the way for data of this size until trials say otherwise
TRIALS: Final = 36  # address of the times of each way for this size; 0 for `FIRST` always
BEGAN: Final = 37  # time at which a trial began, or 0
STRIDE: Final = 38  # bytes from one place in a slot to the next
PLACES: Final = 39  # places in a slot, which slices use in turn; at least 1
SUMS: Final = 40  # address of the function that reduces all ranks' buffers at once, see `SumTable`; or 0
TABLE: Final = 41  # address of its table
WORDS: Final = 42  # for uneven sizes, followed by elements for and from each rank

COPIED: Final = 0  # into a slot
PAST_CACHES: Final = 1  # into a slot: faster where the caches of peers are far away
IN_PLACE: Final = 2  # the slot holds addresses
WAYS: Final = 3

PUT_AT: Final = 0  # offsets in a rank's line
REDUCED_AT: Final = 8
TAKEN_AT: Final = 16
TAGS_AT: Final = 24  # for each slot of the ring, the tag of its operation, with `EXPOSED`
KNOWN_AT: Final = 64  # slices known to be taken by all peers; on a cache line that peers rarely read

NEVER: Final = 0
ALWAYS: Final = 1
ASK: Final = 2
CALLS_AT: Final = 0  # offsets in `TRIALS`
CHOICE_AT: Final = 8  # the way for calls that are no trials
LEAST_AT: Final = 16  # least picoseconds per byte of each way
TRIED: Final = 64  # bytes
UNKNOWN: Final = 1 << 56
PERIOD: Final = 2048  # calls after which all ways are tried again: ranks may have moved to other cores
ROUND: Final = 32  # calls that begin with one trial of each way; trials in a row would disturb each other
ROUNDS: Final = 6
EXPOSED: Final = 1 << 32  # above a tag: the slot holds `PROCESS` and addresses, not the data
WITHDRAWN: Final = -1  # in place of a tag: exposed, as the slot holds no data, but of no operation
PAGE: Final = 4096
CHUNK: Final = 128 << 10  # bytes read at a time and then reduced, so that they stay in the core's cache
