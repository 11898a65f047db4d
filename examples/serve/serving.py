"""The ranks that serve: how they hold the model, and how they write text."""

from __future__ import annotations

from collections.abc import Sequence

import tensor_parallel
import torch
from torch import Tensor
from transformer import LanguageModel, Shape

import mcr_plus as mcr

COLUMNS = {"attention.qkv": 3, "feed_forward.up": 1}  # layers, and the equal parts of their outputs
ROWS = ("attention.out.weight", "feed_forward.down.weight")
TEMPERATURE = 0.7


class Group:
    """What the layers of `tensor_parallel` need, in a group of the job; nothing here is differentiated."""

    def __init__(self, comm: mcr.Communicator) -> None:
        self.comm = comm
        self.rank = comm.rank
        self.world_size = comm.size

    def replicate(self, x: Tensor, tag: str) -> Tensor:  # noqa: ARG002
        return x

    def all_reduce(self, x: Tensor, tag: str) -> Tensor:
        self.comm.all_reduce(x, tag=tag)
        return x


def layout_of(name: str, shape: Sequence[int], ranks: Sequence[int]) -> mcr.Layout:
    """Where the elements of a parameter lie on the ranks that serve."""
    for layer, parts in COLUMNS.items():
        if f"{layer}." in name:
            return _columns(shape, ranks, parts)
    if name.endswith(ROWS):
        return mcr.Layout.sharded(shape, ranks, 1)
    return mcr.Layout.replicated(shape, ranks)


def _columns(shape: Sequence[int], ranks: Sequence[int], parts: int) -> mcr.Layout:
    """Each rank has its share of each of the parts: a box in each."""
    outputs, *rest = shape
    part = outputs // parts
    share = part // len(ranks)
    whole = [(0, size) for size in rest]
    return mcr.Layout.boxes(
        shape,
        {
            rank: [
                ((start, start + share), *whole) for start in range(number * share, outputs, outputs // parts)
            ]
            for number, rank in enumerate(ranks)
        },
    )


def share_of(name: str, whole: Tensor, number: int, servers: int) -> Tensor:
    """The same share of a whole parameter, cut out by hand: of the server with this number."""
    for layer, parts in COLUMNS.items():
        if f"{layer}." in name:
            parted: Tensor = whole.unflatten(0, (parts, servers, -1))
            return parted[:, number].flatten(0, 1)
    return whole.chunk(servers, 1)[number] if name.endswith(ROWS) else whole


class Server:
    """This rank's share of the model. `weights`: its parameters, as `layout_of` has them."""

    def __init__(self, shape: Shape, comm: mcr.Communicator, dtype: torch.dtype) -> None:
        self.sequence = shape.sequence
        self.model = tensor_parallel.build(shape, 0, Group(comm)).to(dtype)  # type: ignore[arg-type]
        self.weights: dict[str, Tensor] = {}
        for name, whole in whole_shapes(shape).items():
            local = layout_of(name, whole, comm.ranks).local_shape(comm.ranks[comm.rank])
            assert local is not None
            self.weights[name] = self.model.get_parameter(name).data.view(local)

    @torch.no_grad()
    def loss(self, windows: Tensor) -> float:
        """The mean cross entropy of a byte."""
        found: Tensor = self.model(windows).text
        return found.item()

    @torch.no_grad()
    def write(self, prompt: str, length: int, seed: int) -> str:
        """Continue the prompt by `length` bytes. All ranks that serve draw the same ones."""
        text = list(prompt.encode())
        random = torch.Generator().manual_seed(seed)
        for _ in range(length):
            logits = self.model.predict(torch.tensor([text[-self.sequence :]]))[0, -1]
            chances = torch.softmax(logits.double() / TEMPERATURE, 0)
            text.append(int(torch.multinomial(chances, 1, generator=random)))
        return bytes(text).decode(errors="replace")


def whole_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The global shape of each parameter."""
    return {name: tuple(each.shape) for name, each in LanguageModel(shape, 0).named_parameters()}
