"""Exchanges of expert parallelism: rows to the experts, and sums back.

A dispatch is two operations. The first carries properties to compare, and counts; every rank derives the
sizes of the second operation from the counts. The second operation sends to each rank the rows and, for each
entry, a weight and the index of its row:

    header, if any | rows | up to 7 bytes | weights of entries | rows of entries | up to 15 bytes

With a bound on the rows (`max_rows`), a dispatch is one operation, with the counts in front, and messages
have a fixed length. A rank sends nothing to itself: it reads its own rows in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.kinds import dtype_name
from mcr_plus.core.work import Work
from mcr_plus.errors import BackendError, InvalidArgument, Unsupported
from mcr_plus.parallel import routing_kernels as lists_of
from mcr_plus.parallel import row_kernels
from mcr_plus.parallel.routing_kernels import Ints, ReceivedRows, SentRows
from mcr_plus.parallel.row_kernels import Format, Lists, Wire

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of tokens."""
WEIGHTS: Final = (None, torch.float32, torch.float64)
"""Dtypes of weights in messages; None without weights."""

_FACTS: Final = (
    "experts",
    "experts per token",
    "hidden",
    "dtype",
    "dtype of weights",
    "compress",
    "compress_back",
)
_ROWS: Final = 1 + len(_FACTS)  # preceded by a flag (arguments refused) and the rank's properties
_COUNTS: Final = _ROWS + 1


@cache
def ready(dtype: torch.dtype, form: Format) -> None:
    """Load the kernels for rows of a dtype in a format, and the kernels for lists."""
    lists_of.prepare()
    row_kernels.prepare(dtype, form)


class Spread(NamedTuple):
    """Distribution of the experts over the ranks.

    Attributes:
        firsts: [ranks + 1] first expert of each rank.
        owners: [experts] rank of each expert.
        most: largest number of experts on a rank.
    """

    firsts: Ints
    owners: Ints
    most: int


@cache
def spread(experts: int, ranks: int) -> Spread:
    """Distribute experts in consecutive runs of equal length; the first ranks get one more if necessary."""
    each, more = divmod(experts, ranks)
    lengths = np.full(ranks, each, np.int64)
    lengths[:more] += 1
    return Spread(_ends(lengths), np.repeat(np.arange(ranks), lengths), each + bool(more))


def _ends(lengths: npt.NDArray[Any]) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


@dataclass(frozen=True)
class Facts:
    """Properties that must be equal on all ranks; `there`, `back`: row formats to the experts and back."""

    experts: int
    choices: int
    hidden: int
    dtype: torch.dtype
    weights: torch.dtype | None
    there: Format
    back: Format

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Return the properties as numbers, in the order of `_FACTS`."""
        forms = row_kernels.FORMATS
        return (
            self.experts, self.choices, self.hidden, DTYPES.index(self.dtype), WEIGHTS.index(self.weights),
            forms.index(self.there), forms.index(self.back),
        )  # fmt: skip


def _shown(fact: int, number: int) -> str:
    name = _FACTS[fact]
    if name.startswith("dtype"):
        dtype = (DTYPES if name == "dtype" else WEIGHTS)[number]
        return "None" if dtype is None else dtype_name(dtype)
    if name.startswith("compress"):
        form = row_kernels.FORMATS[number]
        return "None" if form == "plain" else form
    return str(number)


class Flow(NamedTuple):
    """Rows and entries exchanged with each other rank, in one direction.

    Attributes:
        rows: [ranks + 1] first row of each rank.
        entries: [ranks] number of entries.
    """

    rows: Ints
    entries: Ints


class MessageLayout(NamedTuple):
    """Positions of all ranks' messages in a buffer, in bytes.

    Attributes:
        rows: [ranks] offset of the rows.
        entries: offset and number of each rank's entries.
        sizes: length of each rank's message.
        total: length of the buffer.
    """

    rows: Ints
    entries: list[tuple[int, int]]
    sizes: list[int]
    total: int


class Way(NamedTuple):
    """Format of the messages of an exchange.

    Attributes:
        width, dtype, form: properties of a row.
        weights: dtype of the number that each entry has; None without numbers.
        lists: whether each entry has the index of its row.
        head: number of bytes before the rows of each message.
        slot: fixed length of each message; None for exactly the length needed.
    """

    width: int
    dtype: torch.dtype
    form: Format
    weights: torch.dtype | None
    lists: bool = False
    head: int = 0
    slot: int | None = None

    @property
    def row_bytes(self) -> int:
        """Length of a row."""
        return row_kernels.nbytes(self.width, self.dtype, self.form)

    def length(self, rows: Any, entries: Any) -> tuple[Any, Any]:
        """Return the offset of the entries and the total length of a message (ints or arrays)."""
        each = (0 if self.weights is None else self.weights.itemsize) + 4 * self.lists
        begin = -(-(rows * self.row_bytes + self.head) // 8) * 8
        return begin, -(-(begin + entries * each) // 16) * 16

    def layout(self, flow: Flow, rank: int) -> MessageLayout:
        """Return the layout of the messages of one side; `rank` itself has no message."""
        begins, sizes = self.length(np.diff(flow.rows), flow.entries)
        if self.slot is not None:
            sizes[:] = self.slot
            sizes[rank] = 0
        ends = np.cumsum(sizes)
        bases = ends - sizes
        entries = list(zip((bases + begins).tolist(), flow.entries.tolist(), strict=True))
        return MessageLayout(bases + self.head, entries, sizes.tolist(), int(ends[-1]))


class ExpertExchange(NamedTuple):
    """An operation, done or in flight; keeps its input until it is done."""

    way: Way
    received: torch.Tensor
    sent: torch.Tensor
    work: Work | None

    def wait(self) -> None:
        """Wait until the received bytes have arrived."""
        if self.work is not None:
            self.work.wait()


class Routing:
    """Routing computed by one dispatch: destination rank and row of every token.

    Later dispatches of other tokens with the same experts may reuse it, on all ranks.

    Attributes:
        experts: number of experts on all ranks together.
        local_experts: experts of this rank, `range(first, last + 1)`.
        tokens, choices: n and k of the expert ids, [n, k].
        counts: rows of each local expert, one after another in this order.
        load: int64 [k, experts], number of tokens of all ranks that chose each expert as their first, second,
            … choice, dropped choices included; None unless requested.
        dropped: number of choices of this rank's tokens that were dropped because their experts had reached
            `capacity`.
    """

    def __init__(
        self, comm: Communicator, facts: Facts, sent: SentRows, tokens: int, tag: str, backend: str | None
    ) -> None:
        self._comm, self._facts, self._sent = comm, facts, sent
        self._tag, self._backend = tag, backend
        self._spread = spread(facts.experts, comm.size)
        first, after = (int(self._spread.firsts[comm.rank + step]) for step in (0, 1))
        self.experts, self.local_experts = facts.experts, range(first, after)
        self.tokens, self.choices = tokens, facts.choices
        self.counts: list[int] = []
        self.load: torch.Tensor | None = None
        self.dropped = int(sent.load.sum() - sent.counts.sum())
        self._entries = _ends(sent.counts)[self._spread.firsts]  # [ranks + 1] first entry of each rank
        self._out = Flow(sent.firsts, self._of_others(np.diff(self._entries)))
        self._counts: Ints  # [ranks, local experts]
        self._in: Flow
        self._found: ReceivedRows
        self._layouts: dict[tuple[Way, bool], MessageLayout] = {}  # by way and side

    def _layout(self, way: Way, of_tokens: bool) -> MessageLayout:
        """Return the layout of messages that hold rows of this rank's tokens, or of its experts."""
        found = self._layouts.get((way, of_tokens))
        if found is None:
            found = way.layout(self._out if of_tokens else self._in, self._comm.rank)
            self._layouts[way, of_tokens] = found
        return found

    def _of_others(self, numbers: Ints) -> Ints:
        numbers[self._comm.rank] = 0
        return numbers

    @property
    def rows(self) -> int:
        """Number of rows for all experts of this rank."""
        return sum(self.counts)

    # -- counts -------------------------------------------------------------------------------------

    def header(self, refuses: bool, load: bool) -> torch.Tensor:
        """Return properties and counts for each rank, int32 [ranks, numbers]. `refuses`: bad arguments."""
        comm, sent, firsts = self._comm, self._sent, self._spread.firsts.tolist()
        most = self._spread.most
        numbers = np.zeros((comm.size, _COUNTS + most + (sent.load.size if load else 0)), np.int32)
        numbers[:, 0] = refuses
        numbers[:, 1:_ROWS] = self._facts.numbers
        if not refuses:
            numbers[:, _ROWS] = np.diff(sent.firsts)
            for rank in range(comm.size):
                counts = sent.counts[firsts[rank] : firsts[rank + 1]]
                numbers[rank, _COUNTS : _COUNTS + len(counts)] = counts
            if load:
                numbers[:, _COUNTS + most :] = sent.load.reshape(-1)
        self._said = numbers
        return torch.from_numpy(numbers)

    def exchange_counts(self, header: torch.Tensor) -> torch.Tensor:
        """Return the headers of all ranks for this rank."""
        if self._comm.size == 1:
            return header
        heard = torch.empty_like(header)
        tag = f"{self._tag}.counts"
        self._comm.all_to_all_single(heard, header, backend=self._backend, compress=False, tag=tag)
        return heard

    def learn_counts(self, heard: torch.Tensor, load: bool) -> None:
        """Store all ranks' headers; raises `InvalidArgument` if a rank refuses, or properties differ."""
        numbers: npt.NDArray[np.int32] = heard.numpy()
        if size := len(self._comm.attached.get("unheard", ())):  # rank r + d sends as much to r as r to r - d
            if self.experts % size:
                raise Unsupported(f"simulated: {self.experts} experts on {size} ranks; expected a multiple")
            numbers = self._said[(2 * self._comm.rank - np.arange(size)) % size]
        self._compare(numbers)
        self._counts = numbers[:, _COUNTS : _COUNTS + len(self.local_experts)].astype(np.int64)
        self.counts = self._counts.sum(0).tolist()
        self._in = Flow(_ends(numbers[:, _ROWS]), self._of_others(self._counts.sum(1)))
        if load:
            total = numbers[:, _COUNTS + self._spread.most :].sum(0, dtype=np.int64)
            self.load = torch.from_numpy(total.reshape(self.choices, self.experts))

    def _compare(self, numbers: npt.NDArray[np.int32]) -> None:
        named = self._comm.opened.group.named
        refusing = np.flatnonzero(numbers[:, 0])
        if len(refusing):
            raise InvalidArgument(
                f"dispatch: {named(refusing[0])} refuses its arguments; its error has the reason"
            )
        facts = numbers[:, 1:_ROWS]
        different = np.argwhere(facts != facts[0])
        if len(different):
            rank, fact = map(int, different[0])
            one, other = (_shown(fact, int(facts[at, fact])) for at in (0, rank))
            raise InvalidArgument(
                f"dispatch: expected the same {_FACTS[fact]} on all ranks, got {one} on {named(0)} "
                f"and {other} on {named(rank)}"
            )

    # -- to the experts -----------------------------------------------------------------------------

    def way_there(self, x: torch.Tensor, weights: torch.Tensor | None, lists: bool = False) -> Way:
        """Return the format for `x` [tokens, width], with weights [tokens, k] if there are any."""
        return Way(x.shape[1], x.dtype, self._facts.there, None if weights is None else weights.dtype, lists)

    def bounded(self, way: Way, header: torch.Tensor, max_rows: int) -> Way:
        """Return `way` with messages for a header and up to `max_rows` rows."""
        way = way._replace(head=-(-header.shape[1] * 4 // 16) * 16)
        return way._replace(slot=way.length(max_rows, max_rows * self.choices)[1])

    def start_there(
        self,
        way: Way,
        x: torch.Tensor,
        weights: torch.Tensor | None,
        header: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> ExpertExchange:
        """Send rows to the ranks of their experts, preceded by the header if there is one.

        A rank that refuses its arguments sends only the header.
        """
        ready(way.dtype, way.form)
        refuses = header is not None and bool(header[0, 0])
        out = Flow(np.zeros_like(self._out.rows), np.zeros_like(self._out.entries)) if refuses else self._out
        layout = way.layout(out, self._comm.rank) if refuses else self._layout(way, True)
        buffer = torch.empty(layout.total, dtype=torch.uint8, device=x.device)
        if header is not None:
            for base, size, numbers in zip(layout.rows.tolist(), layout.sizes, header, strict=True):
                if size:
                    raw = numbers.view(torch.uint8)
                    buffer[base - way.head : base - way.head + len(raw)] = raw.to(x.device)
        if not refuses:
            at = lists_of.addresses(out.rows, layout.rows, way.row_bytes)
            row_kernels.pack(x, self._sent.tokens, Wire(buffer, at, way.form))
            self._put_entries(way, layout, buffer, weights)
        sizes = layout.sizes if way.slot is not None else self._layout(way, False).sizes
        return self._all_to_all(way, buffer, layout.sizes, sizes, "dispatch", async_op)

    def _put_entries(
        self, way: Way, layout: MessageLayout, buffer: torch.Tensor, weights: torch.Tensor | None
    ) -> None:
        if weights is None and not way.lists:
            return
        values = None if weights is None else self._of_entries(weights)
        rows = torch.from_numpy(self._sent.entry_rows) if way.lists else None
        for (at, count), first in zip(layout.entries, self._entries.tolist(), strict=False):
            for each in (values, rows) if count else ():
                if each is not None:
                    raw = each[first : first + count].view(torch.uint8)
                    buffer[at : at + len(raw)] = raw.to(buffer.device)
                    at += len(raw)

    def _of_entries(self, weights: torch.Tensor) -> torch.Tensor:
        choices = torch.from_numpy(self._sent.entry_choices).to(weights.device)
        return weights.reshape(-1)[choices]

    def header_of(self, exchange: ExpertExchange, header: torch.Tensor) -> torch.Tensor:
        """Return the headers of all ranks from an exchange with headers; this rank's own is `header`."""
        heard, begin = header.clone(), 0
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                raw = exchange.received[begin : begin + 4 * header.shape[1]]
                heard[rank] = raw.cpu().view(torch.int32)
                begin += exchange.way.slot or 0
        return heard

    def rows_there(self, exchange: ExpertExchange) -> Wire:
        """Return the received rows."""
        way = exchange.way
        layout = self._layout(way, False)
        at = lists_of.addresses(self._in.rows, layout.rows, way.row_bytes)
        return Wire(exchange.received, at, way.form)

    def learn_lists(self, exchange: ExpertExchange) -> None:
        """Store the received row indices of entries, and compute the places of rows."""
        own, way = self._comm.rank, exchange.way
        skipped = 0 if way.weights is None else way.weights.itemsize
        parts = []
        for rank, (at, count) in enumerate(self._layout(way, False).entries):
            begin = at + skipped * count
            raw = exchange.received[begin : begin + 4 * count]
            mine = slice(self._entries[own], self._entries[own + 1])
            parts.append(self._sent.entry_rows[mine] if rank == own else raw.cpu().view(torch.int32).numpy())
        self._found = lists_of.received(self._counts, self._in.rows, np.concatenate(parts), own, self.tokens)
        if self._found.bad:
            raise BackendError(
                f"{self._tag}.dispatch: an entry names a row that was not received; the data is damaged"
            )

    def weights_there(self, exchange: ExpertExchange, weights: torch.Tensor) -> torch.Tensor:
        """Return the weight of each row, [rows]; `weights` [tokens, k] are this rank's own."""
        own, way = self._comm.rank, exchange.way
        first, after = self._entries[own : own + 2].tolist()
        parts = []
        for rank, (at, count) in enumerate(self._layout(way, False).entries):
            raw = exchange.received[at : at + count * weights.itemsize]
            parts.append(self._of_entries(weights)[first:after] if rank == own else raw.view(weights.dtype))
        entries = torch.cat(parts)
        placed = torch.empty_like(entries)
        placed[torch.from_numpy(self._found.places).to(entries.device)] = entries
        return placed

    @property
    def sources(self) -> Ints:
        """Return the source of each row: the index of a received row, or -1 - t for token t of this rank."""
        return self._found.sources

    # -- back ---------------------------------------------------------------------------------------

    def start_back(
        self,
        values: torch.Tensor,
        weights: torch.Tensor | None,
        numbers: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> ExpertExchange:
        """Return to each received token's rank the sum of the token's rows on this rank's experts.

        Args:
            values: [rows, width].
            weights: [rows], factor of each row; None for 1.
            numbers: [rows], a number to send back for each row.
            async_op: do not wait.
        """
        ready(values.dtype, self._facts.back)
        found = self._found
        way = Way(values.shape[1], values.dtype, self._facts.back, None if numbers is None else numbers.dtype)
        layout = self._layout(way, False)
        buffer = torch.empty(layout.total, dtype=torch.uint8, device=values.device)
        at = lists_of.addresses(self._in.rows, layout.rows, way.row_bytes)
        lists = Lists(found.row_firsts, found.row_positions)
        row_kernels.pack_sums(values, weights, lists, Wire(buffer, at, way.form))
        if numbers is not None:
            firsts = _ends(self._counts.sum(1)).tolist()
            entries = numbers[torch.from_numpy(found.places).to(numbers.device)]
            for (begin, count), first in zip(layout.entries, firsts, strict=False):
                raw = entries[first : first + count].view(torch.uint8)
                buffer[begin : begin + len(raw)] = raw
        return self._all_to_all(way, buffer, layout.sizes, self._layout(way, True).sizes, "combine", async_op)

    def sums_back(
        self, exchange: ExpertExchange, values: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Return received sums plus this rank's own, [tokens, width]; arguments as in `start_back`."""
        way, found = exchange.way, self._found
        layout = self._layout(way, True)
        at = lists_of.addresses(self._out.rows, layout.rows, way.row_bytes)
        out = values.new_empty(self.tokens, way.width)
        row_kernels.unpack_sums(
            values, weights, Lists(found.own_firsts, found.own_positions),
            Wire(exchange.received, at, way.form), Lists(self._sent.token_firsts, self._sent.token_rows), out,
        )  # fmt: skip
        return out

    def numbers_back(self, exchange: ExpertExchange, numbers: torch.Tensor) -> torch.Tensor:
        """Return the received number of each choice, [tokens, k]; 0 for dropped or missing choices."""
        own = self._comm.rank
        first, after = _ends(self._counts.sum(1))[own : own + 2].tolist()
        mine = torch.from_numpy(self._found.places[first:after]).to(numbers.device)
        parts = []
        for rank, (at, count) in enumerate(self._layout(exchange.way, True).entries):
            raw = exchange.received[at : at + count * numbers.itemsize]
            parts.append(numbers[mine] if rank == own else raw.view(numbers.dtype))
        out = numbers.new_zeros(self.tokens * self.choices)
        out[torch.from_numpy(self._sent.entry_choices).to(numbers.device)] = torch.cat(parts)
        return out.view(self.tokens, self.choices)

    def _all_to_all(
        self, way: Way, buffer: torch.Tensor, sent: list[int], received: list[int], what: str, async_op: bool
    ) -> ExpertExchange:
        output = torch.empty(sum(received), dtype=torch.uint8, device=buffer.device)
        work = None
        if self._comm.size > 1:
            work = self._comm.all_to_all_single(
                output, buffer, received, sent, async_op, backend=self._backend, compress=False,
                tag=f"{self._tag}.{what}",
            )  # fmt: skip
        return ExpertExchange(way, output, buffer, work)
