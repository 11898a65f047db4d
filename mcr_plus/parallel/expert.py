"""Expert parallelism: send tokens to the ranks of their experts, and the experts' answers back.

    from mcr_plus import expert

    routed = expert.dispatch(x, expert_ids, weights, experts=64)
    parts = routed.rows.split(routed.counts)  # one part per local expert
    answers = torch.cat([one(part) for one, part in zip(local_experts, parts)])
    y = expert.combine(answers, routed)  # weighted sums, [n, hidden]

A token is sent once to each rank that has one of its experts, and each such rank returns one weighted sum of
its experts' answers. Both functions are differentiable: the backward pass of `dispatch` communicates like
`combine`, and vice versa. The interface resembles DeepEP's (https://github.com/deepseek-ai/DeepEP);
the exchange runs over any library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar, cast, overload

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.kinds import dtype_name
from mcr_plus.core.units import whole_number
from mcr_plus.errors import InvalidArgument
from mcr_plus.job.init import member_of
from mcr_plus.parallel import routing_kernels as lists_of
from mcr_plus.parallel import row_kernels
from mcr_plus.parallel.expert_routing import DTYPES, WEIGHTS, ExpertExchange, Facts, Routing, ready, spread
from mcr_plus.parallel.row_kernels import Format

__all__ = ["Dispatched", "Pending", "Routing", "combine", "dispatch"]

Result = TypeVar("Result")
Codec = Literal["bf16", "fp8_block"]

_FORMATS: Final[dict[Codec | None, Format]] = {None: "plain", "bf16": "bf16", "fp8_block": "fp8_block"}


class Pending(Generic[Result]):
    """An operation in flight (`async_op=True`). Its input tensors must not change before `wait`."""

    def __init__(self, finish: Callable[[], Result]) -> None:
        self._finish: Callable[[], Result] | None = finish
        self._result: Result

    def wait(self) -> Result:
        """Wait for the result and return it; raises what the operation raises."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result


@dataclass(frozen=True)
class Dispatched:
    """Tokens that this rank's experts have received.

    Attributes:
        rows: [m, hidden], ordered by local expert, then by rank, then by token; with the dtype of the tokens.
            A token has one row for each of its experts on this rank.
        counts: rows of each local expert; they sum to m.
        weights: [m] weight of each row, by which `combine` multiplies its answer; None for 1.
        routing: the routing, reusable by another dispatch with the same experts.
    """

    rows: torch.Tensor
    counts: list[int]
    weights: torch.Tensor | None
    routing: Routing

    @property
    def load(self) -> torch.Tensor | None:
        """Tokens that chose each expert, see `Routing`."""
        return self.routing.load

    @property
    def dropped(self) -> int:
        """Number of dropped choices, see `Routing`."""
        return self.routing.dropped


@overload
def dispatch(x: torch.Tensor, expert_ids: torch.Tensor | None = ..., weights: torch.Tensor | None = ..., *,
             experts: int | None = ..., routing: Routing | None = ..., capacity: int | None = ...,
             max_rows: int | None = ..., load: bool = ..., compress: Codec | None = ...,
             compress_back: Codec | None = ..., group: Communicator | None = ..., backend: str | None = ...,
             tag: str = ..., async_op: Literal[False] = ...) -> Dispatched: ...  # fmt: skip
@overload
def dispatch(x: torch.Tensor, expert_ids: torch.Tensor | None = ..., weights: torch.Tensor | None = ..., *,
             experts: int | None = ..., routing: Routing | None = ..., capacity: int | None = ...,
             max_rows: int | None = ..., load: bool = ..., compress: Codec | None = ...,
             compress_back: Codec | None = ..., group: Communicator | None = ..., backend: str | None = ...,
             tag: str = ..., async_op: Literal[True]) -> Pending[Dispatched]: ...  # fmt: skip
def dispatch(
    x: torch.Tensor,
    expert_ids: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    *,
    experts: int | None = None,
    routing: Routing | None = None,
    capacity: int | None = None,
    max_rows: int | None = None,
    load: bool = False,
    compress: Codec | None = None,
    compress_back: Codec | None = None,
    group: Communicator | None = None,
    backend: str | None = None,
    tag: str = "expert",
    async_op: bool = False,
) -> Dispatched | Pending[Dispatched]:
    """Send every token to the ranks of its experts; all ranks of the group call it, each with its own tokens.

    Each rank has consecutive experts, the same number on all ranks; if the numbers do not divide, the first
    ranks have one more. Numbers of tokens may differ between ranks, and be 0. The exchange is two operations,
    the first of which carries counts; with `max_rows` or `routing` it is one operation.

    Args:
        x: [n, hidden], float32, bfloat16, float16 or float64. Its gradient is the sum over the token's
            experts.
        expert_ids: integers [n, k], from 0 to `experts` - 1, or -1 for none. A token that names an expert
            twice gets two rows there.
        weights: [n, k] weights of the experts' answers, floating-point; sent as float32 (float64
            as float64). `combine` computes their gradients. None: all are 1.
        experts: number of experts on all ranks together. Ranks may have none.
        routing: routing of an earlier dispatch, instead of `expert_ids`, `experts`, `capacity`, `max_rows`,
            `load`, `compress`, `compress_back`, `group`, `backend` and `tag`. `x` must have the same number
            of tokens.
        capacity: maximum number of this rank's choices that an expert accepts: first choices before second
            choices, each in the order of tokens. Other choices are dropped. None: no limit.
        max_rows: maximum number of tokens that a rank sends to another, the same on all ranks. Messages then
            have this fixed size and include the counts. Pays off for few tokens.
        load: also return how many tokens of all ranks chose each expert, to balance losses and biases.
        compress: None, `bf16` or `fp8_block` (e4m3 with a float32 scale for each 256 values of a token):
            format of tokens on the way to the experts and, in the backward pass, of gradients of answers.
            Rows that stay on their rank are exact.
        compress_back: format of answers on the way back, and of gradients of tokens.
        group: the participating ranks; None: all ranks.
        backend, tag: as in `mcr.all_to_all_single`; operations are named `<tag>.counts`, `<tag>.dispatch` and
            `<tag>.combine`.
        async_op: return a `Pending` at once (without `max_rows` and `routing`: after the counts).

    Raises:
        InvalidArgument: an argument is wrong. All ranks raise for ids out of range, shapes of ids and weights
            that do not match, more than `max_rows` rows on one rank, and differences between ranks in
            `experts`, k, hidden, dtype or `compress`.

    Example:
        ```python
        from mcr_plus import expert

        x = torch.ones(3, 8, requires_grad=True)
        ids = torch.tensor([[0, 1], [1, 2], [3, -1]])
        routed = expert.dispatch(x, ids, torch.full((3, 2), 0.5), experts=4)
        y = expert.combine(routed.rows * 2, routed)
        assert y[:, 0].tolist() == [2.0, 2.0, 1.0]
        ```
    """
    if routing is not None:
        given = (expert_ids, experts, capacity, max_rows, compress, compress_back, group, backend)
        if any(each is not None for each in given) or load or tag != "expert":
            raise InvalidArgument(
                "dispatch: with routing= expected only x and weights; the routing has the other arguments"
            )
        return _again(routing, x, weights, async_op)
    comm = member_of(group)
    _check_tokens(x)
    ids = _checked_ids(expert_ids)
    count = _integer(experts, "experts", 1)
    assert count is not None
    limit = _integer(capacity, "capacity", 0, optional=True)
    bound = _integer(max_rows, "max_rows", 1, optional=True)
    weights = _travelling(weights)
    formats = (_format(compress, "compress"), _format(compress_back, "compress_back"))
    facts = Facts(
        count, ids.shape[1], x.shape[1], x.dtype, None if weights is None else weights.dtype, *formats
    )
    ready(x.dtype, facts.there)
    numbers = ids.detach().to("cpu", torch.int64).contiguous().numpy()
    sent = lists_of.sent(numbers, spread(count, comm.size).owners, comm.size, comm.rank, limit)
    made = Routing(comm, facts, sent, len(x), tag, backend)
    error = _refusal(x, ids, weights, count, sent, bound, comm)
    header = made.header(error is not None, load)
    detached = x.detach().contiguous()
    plain = None if weights is None else weights.detach().contiguous()
    way = made.way_there(detached, plain, lists=True)
    # With a bound, sizes are known in advance and counts travel along; otherwise counts go first.
    if bound is not None and comm.size > 1:
        way = made.bounded(way, header, bound)
        exchange = made.start_there(way, detached, plain, header, async_op)
    else:
        _learn(made, made.exchange_counts(header), load, error)
        exchange = made.start_there(way, detached, plain, None, async_op)

    def finish() -> Dispatched:
        exchange.wait()
        if way.slot is not None:
            _learn(made, made.header_of(exchange, header), load, error)
        made.learn_lists(exchange)
        return _dispatched(made, exchange, x, weights)

    return Pending(finish) if async_op else finish()


def _learn(made: Routing, heard: torch.Tensor, load: bool, error: InvalidArgument | None) -> None:
    if error is not None:  # the other ranks have received the refusal
        raise error
    made.learn_counts(heard, load)


def _again(
    routing: Routing, x: torch.Tensor, weights: torch.Tensor | None, async_op: bool
) -> Dispatched | Pending[Dispatched]:
    """Dispatch other tokens with the same routing."""
    if not isinstance(routing, Routing):
        raise InvalidArgument(f"routing: expected that of a dispatch, got {type(routing).__name__}")
    _check_tokens(x)
    weights = _travelling(weights)
    shape = (routing.tokens, routing.choices)
    if len(x) != routing.tokens:
        raise InvalidArgument(f"x: expected the {routing.tokens} tokens of its routing, got {len(x)}")
    if weights is not None and weights.shape != shape:
        raise InvalidArgument(
            f"weights: expected shape {list(shape)} of its routing, got {list(weights.shape)}"
        )
    detached = x.detach().contiguous()
    plain = None if weights is None else weights.detach().contiguous()
    exchange = routing.start_there(routing.way_there(detached, plain), detached, plain, None, async_op)

    def finish() -> Dispatched:
        exchange.wait()
        return _dispatched(routing, exchange, x, weights)

    return Pending(finish) if async_op else finish()


def _dispatched(
    routing: Routing, exchange: ExpertExchange, x: torch.Tensor, weights: torch.Tensor | None
) -> Dispatched:
    rows, placed = _applied(_Dispatch, x, weights, routing, exchange)
    return Dispatched(rows, routing.counts, placed, routing)


@overload
def combine(answers: torch.Tensor, routed: Dispatched, *, async_op: Literal[False] = ...) -> torch.Tensor: ...
@overload
def combine(
    answers: torch.Tensor, routed: Dispatched, *, async_op: Literal[True]
) -> Pending[torch.Tensor]: ...
def combine(
    answers: torch.Tensor, routed: Dispatched, *, async_op: bool = False
) -> torch.Tensor | Pending[torch.Tensor]:
    """Return, for every token, the weighted sum of its experts' answers; all ranks of the group call it.

    Sums are computed in float32 (for float64 in float64): first over the experts of a rank, so that one sum
    is sent, then over the ranks. A token without experts gets 0.

    Args:
        answers: [m, any width], the answer to each of `routed.rows`, with a dtype that `x` may have.
        routed: the result of `dispatch`; the group, library, tag and `compress_back` of `dispatch` apply.
        async_op: return a `Pending` at once.

    Returns:
        [n, width], with the dtype of `answers`.

    Raises:
        InvalidArgument: `answers` has another number of rows, or a dtype that tokens cannot have.
    """
    if not isinstance(routed, Dispatched):
        raise InvalidArgument(f"routed: expected what dispatch has returned, got {type(routed).__name__}")
    _check_tokens(answers, "answers")
    routing, weights = routed.routing, routed.weights
    if len(answers) != routing.rows:
        raise InvalidArgument(
            f"answers: expected {routing.rows} rows, as many as were dispatched, got {len(answers)}"
        )
    detached = answers.detach().contiguous()
    plain = None if weights is None else weights.detach()
    exchange = routing.start_back(detached, plain, None, async_op)

    def finish() -> torch.Tensor:
        exchange.wait()
        return cast("torch.Tensor", _applied(_Combine, answers, weights, routing, exchange))

    return Pending(finish) if async_op else finish()


# --- differentiation ------------------------------------------------------------------------------------


def _applied(function: type[Function], *arguments: object) -> Any:
    apply: Any = function.apply
    return apply(*arguments)


class _Dispatch(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor | None, routing: Routing, exchange: ExpertExchange
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.routing, ctx.weighted = routing, weights is not None
        own = x.contiguous()
        rows = own.new_empty(routing.rows, own.shape[1])
        row_kernels.unpack(own, routing.rows_there(exchange), routing.sources, rows)
        return rows, None if weights is None else routing.weights_there(exchange, weights)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator has no annotations
        ctx: Any, *grads: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        routing: Routing = ctx.routing
        of_rows = grads[0].contiguous()
        of_weights = grads[1].contiguous() if ctx.weighted else None
        exchange = routing.start_back(of_rows, None, of_weights)
        exchange.wait()
        weights = None if of_weights is None else routing.numbers_back(exchange, of_weights)
        return routing.sums_back(exchange, of_rows, None), weights, None, None


class _Combine(Function):
    @staticmethod
    def forward(
        ctx: Any,
        answers: torch.Tensor,
        weights: torch.Tensor | None,
        routing: Routing,
        exchange: ExpertExchange,
    ) -> torch.Tensor:
        ctx.routing = routing
        ctx.save_for_backward(answers, weights)
        return routing.sums_back(exchange, answers.contiguous(), weights)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator has no annotations
        ctx: Any, *grads: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        routing: Routing = ctx.routing
        answers, weights = ctx.saved_tensors
        gradient = grads[0].contiguous()
        exchange = routing.start_there(routing.way_there(gradient, None), gradient, None)
        exchange.wait()
        wire, out = routing.rows_there(exchange), gradient.new_empty(routing.rows, gradient.shape[1])
        if weights is None:
            row_kernels.unpack(gradient, wire, routing.sources, out)
            return out, None, None, None
        of_weights = torch.empty_like(weights)
        row_kernels.unpack_gradient(
            gradient, wire, routing.sources, weights, answers.contiguous(), out, of_weights
        )
        return out, of_weights, None, None


# --- checks ---------------------------------------------------------------------------------------------


def _check_tokens(x: Any, name: str = "x") -> None:
    if not isinstance(x, torch.Tensor):
        raise InvalidArgument(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if x.ndim != 2:
        raise InvalidArgument(f"{name}: expected shape [rows, width], got {list(x.shape)}")
    if x.dtype not in DTYPES:
        known = ", ".join(map(dtype_name, DTYPES))
        raise InvalidArgument(f"{name}: dtype {dtype_name(x.dtype)}; expected one of {known}")


def _checked_ids(ids: Any) -> torch.Tensor:
    if not isinstance(ids, torch.Tensor):
        raise InvalidArgument(f"expert_ids: expected a torch.Tensor, got {type(ids).__name__}")
    if ids.ndim != 2 or not ids.shape[1]:
        raise InvalidArgument(f"expert_ids: expected shape [tokens, k], k from 1, got {list(ids.shape)}")
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise InvalidArgument(f"expert_ids: expected integers, got {dtype_name(ids.dtype)}")
    return ids


def _travelling(weights: Any) -> torch.Tensor | None:
    """Return the weights in the dtype in which they are sent."""
    if weights is None:
        return None
    if not isinstance(weights, torch.Tensor) or not weights.dtype.is_floating_point:
        got = dtype_name(weights.dtype) if isinstance(weights, torch.Tensor) else type(weights).__name__
        raise InvalidArgument(f"weights: expected a floating-point torch.Tensor or None, got {got}")
    return weights if weights.dtype in WEIGHTS else weights.float()


def _integer(value: Any, name: str, least: int, optional: bool = False) -> int | None:
    if value is None and optional:
        return None
    number = whole_number(value)
    if number is None or number < least:
        other = " or None" if optional else ""
        raise InvalidArgument(f"{name}: expected an integer from {least}{other}, got {value!r}")
    return number


def _format(codec: Any, name: str) -> Format:
    if codec is not None and codec not in _FORMATS:
        known = ", ".join(repr(each) for each in _FORMATS)
        raise InvalidArgument(f"{name}: unknown codec {codec!r}; known: {known}")
    return _FORMATS[codec]


def _refusal(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    experts: int,
    sent: lists_of.SentRows,
    max_rows: int | None,
    comm: Communicator,
) -> InvalidArgument | None:
    """Return the error for wrong values of arguments; the exchange passes it to the other ranks."""
    if len(ids) != len(x):
        return InvalidArgument(
            f"expert_ids: shape {list(ids.shape)} does not fit x of shape {list(x.shape)}; "
            "expected a row per token"
        )
    if weights is not None and weights.shape != ids.shape:
        return InvalidArgument(
            f"weights: expected shape {list(ids.shape)}, that of expert_ids, got {list(weights.shape)}"
        )
    if sent.bad >= 0:
        token, choice = divmod(sent.bad, ids.shape[1])
        return InvalidArgument(
            f"expert_ids[{token}, {choice}]: expected an expert from 0 to {experts - 1}, or -1 for none, "
            f"got {int(ids[token, choice])}"
        )
    rows = (sent.firsts[1:] - sent.firsts[:-1]).tolist()
    if max_rows is not None and max(rows) > max_rows:
        to = rows.index(max(rows))
        named = comm.opened.group.named
        return InvalidArgument(
            f"max_rows: {max(rows)} tokens of {named(comm.rank)} go to {named(to)}, "
            f"expected {max_rows} at most"
        )
    return None
