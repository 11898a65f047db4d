"""Profiles of models: chains of blocks, their bytes, and the file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from experts import ExpertShape, build
from network import Network
from torch import Tensor, nn
from torch.nn import functional
from transformer import LanguageModel, Losses, Shape

import mcr_plus as mcr
from mcr_plus.errors import ConfigError, InvalidArgument, Unsupported
from mcr_plus.plans.blocks import Axis, ModelBlock, Profile

BATCH = 3
WIDTH = 8


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def profiled(model: nn.Module, batch: Any = None, **options: Any) -> Profile:
    batch = torch.ones(BATCH, WIDTH) if batch is None else batch
    return mcr.profile(model, batch, **{"repeats": 1, **options})


def text(losses: Losses) -> Tensor:
    return losses.text


def kept_by_nodes(result: Tensor, left_out: Sequence[Tensor]) -> int:
    """Bytes of the storages that the nodes of a graph keep, found without hooks."""
    storages: dict[int, int] = {}
    known, nodes = set(), [result.grad_fn]
    while nodes:
        if (node := nodes.pop()) is None or node in known:
            continue
        known.add(node)
        nodes += [following for following, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_") and isinstance(kept := getattr(node, name), Tensor):
                storages[kept.untyped_storage().data_ptr()] = kept.untyped_storage().nbytes()
    for tensor in left_out:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


# -- bytes --------------------------------------------------------------------------------------------------


def test_bytes_of_a_small_chain_are_as_by_hand() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Sequential(nn.LayerNorm(32), nn.ReLU()), nn.Linear(32, 2))
    batch = torch.ones(BATCH, WIDTH), torch.zeros(BATCH, 2)
    optimizer = torch.optim.Adam(model.parameters())
    found = profiled(model, batch, optimizer=optimizer, loss=functional.mse_loss)
    assert [block.name for block in found.blocks] == ["0", "1.0", "1.1", "2", "loss"]
    assert [block.kind for block in found.blocks[:3]] == ["Linear", "LayerNorm", "ReLU"]
    assert (found.input, found.state_of, found.unused) == ((BATCH, WIDTH), "Adam", ())
    numbers = [WIDTH * 32 + 32, 64, 0, 64 + 2, 0]
    assert [block.parameters for block in found.blocks] == [4 * each for each in numbers]
    assert [block.gradients for block in found.blocks] == [4 * each for each in numbers]
    # Adam has two moments, and a number of steps of 4 bytes for each of two parameters.
    assert [block.optimizer for block in found.blocks] == [8 * each + 8 * (each > 0) for each in numbers]
    inner, outer = 4 * BATCH * 32, 4 * BATCH * 2
    assert [block.output for block in found.blocks] == [inner, inner, inner, outer, 4]
    assert [block.shape for block in found.blocks] == [(BATCH, 32)] * 3 + [(BATCH, 2), ()]
    # Linear: the batch, which does not count. LayerNorm: its input, and mean and deviation of each row. ReLU:
    # its output, which the next Linear keeps as its input. The loss: output, and the target of the batch.
    saved = [0, inner + 2 * 4 * BATCH, inner, 0, outer]
    assert [block.saved for block in found.blocks] == saved
    assert [block.saved_before for block in found.blocks] == [0, 0, 0, inner, 0]
    assert not optimizer.state


@pytest.mark.parametrize(
    ("make", "moments"),
    [(lambda p: torch.optim.SGD(p, 0.1), 0), (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 1),
     (lambda p: torch.optim.AdamW(p, amsgrad=True), 3)],
)  # fmt: skip
def test_the_state_of_an_optimizer_counts_before_and_after_its_first_step(make: Any, moments: int) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 2, bias=False))
    optimizer = make(model.parameters())
    before = profiled(model, optimizer=optimizer)
    model(torch.ones(BATCH, WIDTH)).sum().backward()
    optimizer.step()
    after = profiled(model, optimizer=optimizer)
    sizes = [block.optimizer for block in before.blocks]
    assert sizes == [block.optimizer for block in after.blocks]
    steps = 4 * (moments == 3)
    assert sizes == [4 * 36 * moments + 2 * steps, 4 * 8 * moments + steps]


def test_the_transformer_of_the_examples_has_the_bytes_of_closed_forms() -> None:
    shape = Shape(layers=3, hidden=16, heads=2, sequence=12)
    model = LanguageModel(shape, 0)
    windows = torch.randint(0, 256, (BATCH, shape.sequence + 1))
    with pytest.raises(Unsupported, match=r"^norm: it shares bytes\.weight with bytes; expected"):
        profiled(model, windows, loss=text)
    model.bytes.weight.mcr_shared = True  # type: ignore[attr-defined]
    found = profiled(model, windows, loss=text, optimizer=torch.optim.Adam(model.parameters()))
    names = ["bytes", "blocks.0", "blocks.1", "blocks.2", "norm + loss"]  # a scalar begins no block
    assert [block.name for block in found.blocks] == names
    h = shape.hidden
    numbers = [(256 + shape.sequence) * h, *[12 * h * h + 13 * h] * 3, 2 * h]
    assert [block.parameters for block in found.blocks] == [4 * each for each in numbers]
    assert sum(numbers) == sum(param.numel() for param in model.parameters())
    assert [block.shape for block in found.blocks] == [(BATCH, shape.sequence, h)] * 4 + [()]
    assert [block.shared for block in found.blocks] == [("bytes.weight",), (), (), (), ("bytes.weight",)]
    assert [block.reads_batch for block in found.blocks] == [False] * 4 + [True]
    params = list(model.parameters())
    assert sum(block.saved for block in found.blocks) == kept_by_nodes(
        text(model(windows)), [*params, windows]
    )
    x = torch.zeros(BATCH, shape.sequence, h, requires_grad=True)
    alone = kept_by_nodes(model.blocks[0](x).output, params)
    assert [b.saved + b.saved_before for b in found.blocks[1:4]] == [alone] * 3
    axes = found.blocks[1].axes
    tokens = BATCH * shape.sequence
    for axis, parts, numel, saved in (
        ("heads", 2, 4 * h * h + 4 * h, (3 + 1) * h + shape.heads),  # q, k, v, output, log-sum of exponents
        ("hidden", 4 * h, 8 * h * h + 5 * h, 2 * 4 * h),  # before and after GELU
    ):
        assert 0 < axes[axis].work < 1  # the rest are norms and sums
        assert axes[axis].model_copy(update={"work": 1.0}) == Axis(
            dims=(),
            parts=(parts,),
            how="sum",
            saved=4 * tokens * saved,
            params=4 * numel,
            input=4 * tokens * h,
        )
    assert axes["sequence"] == Axis(dims=(1,), parts=(shape.sequence,), how="gather")
    assert axes["batch"] == Axis(dims=(0,), parts=(BATCH,), how="split")
    assert found.blocks[0].axes["rows"].parts == (256,)
    assert not any(block.random for block in found.blocks)


def test_the_network_over_space_is_cut_along_space() -> None:
    found = profiled(Network(4, 2, None), torch.rand(2, 1, 8, 8, 8))
    names = [f"blocks.{block}.{part}" for block in range(2) for part in range(3)]
    assert [block.name for block in found.blocks] == [*names, "head.0", "head.1", "head.2"]
    hows = {block.name: {axis: cut.how for axis, cut in block.axes.items()} for block in found.blocks}
    assert hows["blocks.1.0"] == {"batch": "split", "space": "halo", "hidden": "columns"}
    assert hows["blocks.1.2"] == {"batch": "split"}  # the mean over space follows
    assert found.blocks[3].axes["space"] == Axis(dims=(2, 3, 4), parts=(4, 4, 4), how="halo")


# -- times --------------------------------------------------------------------------------------------------


def test_a_block_with_more_work_takes_longer() -> None:
    model = nn.Sequential(nn.Linear(512, 4), nn.Linear(4, 512), nn.Linear(512, 512), nn.Linear(512, 4))
    small, _, large, _ = profiled(model, torch.ones(256, 512), repeats=5).blocks
    for name in ("forward", "backward", "recompute"):
        assert 0 < getattr(small, name) < getattr(large, name)


def test_a_frozen_beginning_has_no_backward_pass() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    first, second, third = profiled(model).blocks
    assert (first.backward, second.backward) == (0, 0)
    assert third.backward > 0
    assert (first.parameters, first.gradients, second.saved) == (4 * 36, 0, 0)


# -- chains -------------------------------------------------------------------------------------------------


class Skips(nn.Module):
    """Layers of which the output of some is added to that of later ones."""

    def __init__(self, layers: int, skips: list[tuple[int, int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        for at, layer in enumerate(self.layers):
            x = layer(x)
            for source in [source for source, target in self.skips if target == at]:
                x = x + outputs[source]
            outputs.append(x)
        return x


@pytest.mark.parametrize("seed", range(12))
def test_the_first_layer_with_a_skip_around_it_is_named(seed: int) -> None:
    chance = random.Random(seed)
    layers = chance.randrange(3, 8)
    pairs = [(source, target) for target in range(layers) for source in range(target)]
    skips = chance.sample(pairs, chance.randrange(1, 3))
    # The output of a layer is the next one's input; it goes around those after that, up to its target.
    around = [source + 2 for source, target in skips if source + 2 <= target]
    if around:
        with pytest.raises(
            Unsupported, match=rf"^layers\.{min(around)}: no block of a chain: the tensor \[3, 8\]"
        ):
            profiled(Skips(layers, skips))
    else:
        found = profiled(Skips(layers, skips))
        assert [block.name for block in found.blocks] == [f"layers.{at}" for at in range(layers)]


def test_a_loss_of_several_layers_is_refused() -> None:
    class Comms:
        rank, world_size, expert = 0, 1, None

        def all_to_all_single(self, output: Tensor, given: Tensor, *_: Any, **__: Any) -> None:
            output.copy_(given)

        def all_to_all(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
            return x.clone()

    comms: Any = Comms()
    model = build(ExpertShape(layers=4, hidden=16, heads=2, sequence=8, experts=4), 0, comms)
    with pytest.raises(
        Unsupported, match=r"^blocks\.2: no block of a chain: the tensor \[\] that model makes"
    ):
        profiled(model, torch.zeros(2, 9, dtype=torch.long), loss=lambda losses: losses.text + losses.penalty)


class Parts(nn.Module):
    """Modules, and what to do with them."""

    def __init__(self, forward: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.run = forward

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.run(self, *inputs, **named)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def test_an_output_that_is_no_tensor_is_refused_unless_the_loss_takes_it() -> None:
    model = Parts(lambda own, x: {"y": own.b(own.a(x))}, a=linear(), b=linear())
    with pytest.raises(Unsupported, match=r"^model: its output is a dict; expected a tensor, or `loss`"):
        profiled(model)
    with pytest.raises(Unsupported, match=r"^loss: its output is a dict"):
        profiled(model, loss=lambda output: output)
    assert [b.name for b in profiled(model, loss=lambda output: output["y"].sum()).blocks] == [
        "a",
        "b",
        "loss",
    ]


def test_data_may_go_to_any_block_and_what_parents_compute_belongs_to_the_block_before() -> None:
    def forward(own: Any, tokens: Tensor, *, dense: Tensor) -> Tensor:
        mask = torch.tril(torch.ones(4, 4))
        places = torch.arange(tokens.shape[1])
        x = own.tokens(tokens) + own.places(places)
        x = own.a(x) @ x.mT @ x
        x = own.b(input=x) + dense * mask.sum()
        return own.c(x).relu()  # type: ignore[no-any-return]

    model = Parts(
        forward,
        tokens=nn.Embedding(5, WIDTH),
        places=nn.Embedding(4, WIDTH),
        a=linear(),
        b=linear(),
        c=linear(),
    )
    batch = {"tokens": torch.zeros(BATCH, 4, dtype=torch.long), "dense": torch.ones(BATCH, 4, 1)}
    found = profiled(model, batch)
    assert [block.name for block in found.blocks] == ["tokens + places", "a", "b", "c"]
    assert [block.reads_batch for block in found.blocks] == [False, False, True, False]
    assert found.blocks[0].parameters == 4 * 9 * WIDTH
    assert sum(b.saved for b in found.blocks) == kept_by_nodes(
        model(**batch), [*model.parameters(), *batch.values()]
    )


def test_a_second_computed_tensor_is_refused_also_where_a_block_gets_it() -> None:
    model = Parts(
        lambda own, x: own.b(own.a(x), x=own.a.weight * 2),
        a=linear(),
        b=Parts(lambda own, y, x: own.c(y @ x), c=linear()),
    )
    with pytest.raises(Unsupported, match=r"^b: no block of a chain: the tensor \[8, 8\] that model makes"):
        profiled(model)


def test_a_module_without_a_chain_inside_is_one_block() -> None:
    skip = Parts(lambda own, x: x + own.b(own.a(x)), a=linear(), b=linear())
    chain = Parts(lambda own, x: own.b(own.norm(own.a(x))), a=linear(), norm=nn.LayerNorm(WIDTH), b=nn.Tanh())
    found = profiled(nn.Sequential(skip, nn.ModuleDict({"in": chain})["in"], linear()))
    assert [block.name for block in found.blocks] == ["0", "1.a", "1.norm", "1.b", "2"]


def test_shared_parameters_are_refused_and_a_reused_module_without_any_is_not() -> None:
    relu, twice = nn.ReLU(), linear()
    found = profiled(nn.Sequential(linear(), relu, linear(), relu))
    assert [block.name for block in found.blocks] == ["0", "1", "2", "1 (2)"]
    with pytest.raises(Unsupported, match=r"^0: it shares 0\.weight with 0"):
        profiled(nn.Sequential(twice, relu, twice))


def test_a_block_has_the_number_of_its_call_also_if_another_one_was_taken_apart() -> None:
    """The first call has data alone around its layers, and the second one what the first has computed."""
    skip = Parts(lambda own, x: x + own.b(own.a(x)), a=nn.Tanh(), b=nn.ReLU())
    found = profiled(Parts(lambda own, x: own.b(own.a(own.b(own.a(x)))), a=skip, b=linear_shared()))
    assert [block.name for block in found.blocks] == ["a.a", "a.b", "b", "a (2)", "b (2)"]


def linear_shared() -> nn.Linear:
    found = linear()
    for param in found.parameters():
        param.mcr_shared = True  # type: ignore[attr-defined]
    return found


def cuts(block: ModelBlock) -> dict[str, Any]:
    return {name: (axis.dims, axis.parts, axis.how) for name, axis in block.axes.items()}


def test_random_blocks_are_noted_and_only_in_training() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
    model = nn.Sequential(linear(), layer, nn.Dropout(0.5), linear())
    x = torch.ones(BATCH, 4, WIDTH)
    assert cuts(profiled(model, x).blocks[1]) == {
        "batch": ((0,), (BATCH,), "split"), "sequence": ((1,), (4,), "gather"),
    }  # fmt: skip
    assert [block.random for block in profiled(model, x).blocks] == [False, True, True, False]
    assert not any(block.random for block in profiled(model.eval(), x).blocks)


def test_nothing_of_the_model_changes() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model(torch.ones(BATCH, WIDTH)).sum().backward()
    before = [(p, p.grad, p.clone(), p.grad.clone()) for p in model.parameters() if p.grad is not None]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    called: list[Tensor] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(called.append)
    found = profiled(model)
    assert all(p.grad is grad and p.equal(own) and grad.equal(kept) for p, grad, own, kept in before)
    assert all(buffer.equal(buffers[name]) for name, buffer in model.named_buffers())
    assert torch.get_rng_state().equal(state)
    assert not called
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert "batch" not in found.blocks[1].axes  # its statistics are those of the whole batch


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_that_is_no_mean_over_items_cannot_be_cut_along_the_batch(
    reduction: str, padded: bool
) -> None:
    targets = torch.tensor([-100 if padded else 1, 0, 1, 1, 0, 1])
    loss = nn.CrossEntropyLoss(reduction=reduction)
    found = profiled(nn.Sequential(linear(), nn.Tanh()), (torch.randn(6, WIDTH), targets), loss=loss)
    assert ("batch" in found.blocks[-1].axes) is (reduction == "mean" and not padded)
    assert all("batch" in block.axes for block in found.blocks[:-1])


@pytest.mark.parametrize("by_class", [False, True])
def test_weights_of_as_many_classes_as_items_are_not_cut_as_data_unseen(by_class: bool) -> None:
    weights = torch.arange(1.0, BATCH + 1)
    batch = torch.randn(BATCH, BATCH), (torch.arange(BATCH), weights)

    def loss(y: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        if by_class:
            return nn.functional.cross_entropy(y, target[0], weight=target[1])
        return y.square().mean() * target[1].sum()

    model = nn.Linear(BATCH, BATCH)
    if by_class:
        with pytest.raises(InvalidArgument, match=f"^batch: the model fails with . of its {BATCH} items"):
            profiled(model, batch, loss=loss)
    else:
        assert "batch" not in profiled(model, batch, loss=loss).blocks[-1].axes


def test_an_unused_parameter_is_listed() -> None:
    model = Parts(lambda own, x: own.b(own.a(x)), a=linear(), b=linear(), c=linear())
    assert profiled(model).unused == ("c.weight", "c.bias")


# -- axes ---------------------------------------------------------------------------------------------------


def test_axes_of_modules_that_are_not_known_can_be_declared() -> None:
    model = nn.Sequential(linear(), Parts(lambda own, x: own.a(x).sin(), a=linear()), nn.Softmax(1))
    assert profiled(model).blocks[2].axes == {}
    model[1].mcr_axes = {"batch": "split", "tables": (26, "exchange")}  # type: ignore[assignment]
    _, declared, _ = profiled(model).blocks
    assert declared.name == "1"
    assert cuts(declared) == {"batch": ((0,), (BATCH,), "split"), "tables": ((), (26,), "exchange")}


@pytest.mark.parametrize(
    "axes", [{"batch": "cut"}, {"hidden": "split"}, {"hidden": (0, "sum")}, {"hidden": (4, 4)}]
)
def test_wrong_axes_are_refused(axes: Any) -> None:
    model = nn.Sequential(linear(), nn.Sigmoid())
    model[1].mcr_axes = axes
    with pytest.raises(InvalidArgument, match=r"^1: its axis \w+: .*expected mcr_axes such as"):
        profiled(model)


class Attention(nn.Module):
    """Queries, keys and values of all heads from one layer, laid out kind by kind, or head by head."""

    def __init__(self, order: tuple[int, ...], skip: float) -> None:
        super().__init__()
        self.heads, self.order, self.skip = 4, order, skip
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        shape = tuple(3 if kind else self.heads for kind in self.order)
        y = self.qkv(x).unflatten(-1, (*shape, -1)).movedim(2 + self.order.index(1), 0)
        query, key, value = y.transpose(2, 3).unbind()
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2)) + self.skip * x
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_cut_only_where_their_parts_add_up(dtype: torch.dtype) -> None:
    """Also if the model's own parameters and input would not show it."""
    for order, skip, adds_up in (((1, 0), 0.0, True), ((0, 1), 0.0, False), ((1, 0), 1.0, False)):
        model = nn.Sequential(nn.Linear(8, 8), Attention(order, skip)).to(dtype)
        before = [param.clone() for param in model.parameters()]
        block = profiled(model, torch.zeros(4, 5, 8, dtype=dtype)).blocks[1]
        assert block.axes.keys() == {"batch", "sequence", *(["heads"] if adds_up else [])}
        assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("skips", [(0.0, 1.0), (1.0, 0.0)])
def test_layers_that_differ_in_a_flag_alone_are_told_apart(skips: tuple[float, ...]) -> None:
    model = nn.Sequential(*(Attention((1, 0), skip) for skip in skips))
    blocks = profiled(model, torch.zeros(4, 5, 8)).blocks
    assert ["heads" in block.axes for block in blocks[:2]] == [skip == 0.0 for skip in skips]


class Penal(nn.Module):
    """An MLP that also returns a number, of its activations or of its input."""

    def __init__(self, of_input: bool) -> None:
        super().__init__()
        self.of_input = of_input
        self.up, self.act, self.down = nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.act(self.up(x))
        return self.down(hidden), (x if self.of_input else hidden).square().mean()


class Scaled(nn.Module):
    def __init__(self, of_input: bool) -> None:
        super().__init__()
        self.mlp = Penal(of_input)

    def forward(self, x: Tensor) -> Tensor:
        y, factor = self.mlp(x)
        whole: Tensor = x + y * factor
        return whole


@pytest.mark.parametrize("of_input", [False, True])
def test_layers_with_a_second_output_of_what_is_cut_are_not_cut(of_input: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Scaled(of_input))
    block = profiled(model, torch.zeros(4, 5, 8)).blocks[1]
    assert ("hidden" in block.axes) == of_input


class Beside(nn.Module):
    """Attention with other numbers of heads beside each other."""

    def __init__(self, heads: Sequence[int]) -> None:
        super().__init__()
        self.each = nn.ModuleList(Attention((1, 0), 0.0) for _ in heads)
        for one, count in zip(self.each, heads, strict=True):
            one.heads = count  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for one in self.each:
            total = total + one(x)
        return total


@pytest.mark.parametrize(("heads", "units"), [((4, 8), 4), ((8, 2), 2), ((4, 4), 4)])
def test_layers_that_are_cut_together_have_units_in_common(heads: Sequence[int], units: int) -> None:
    block = profiled(nn.Sequential(nn.Linear(8, 8), Beside(heads)), torch.zeros(4, 5, 8)).blocks[1]
    assert block.axes["heads"].parts == (units,)


# -- arguments, and the file --------------------------------------------------------------------------------


def test_wrong_arguments_are_refused() -> None:
    for options in ({"repeats": 0}, {"repeats": 1.5}):
        with pytest.raises(InvalidArgument, match="repeats"):
            profiled(linear(), **options)
    for name, kind in (("optimizer", "Optimizer"), ("loss", "Callable")):
        with pytest.raises(InvalidArgument, match=f"^{name}: 'adam'; expected an object of class {kind}"):
            profiled(linear(), **{name: "adam"})
    with pytest.raises(InvalidArgument, match=r"^batch: 'text'; expected a tensor"):
        profiled(linear(), "text")
    with pytest.raises(InvalidArgument, match=r"^loss: its output needs no gradient"):
        profiled(linear(), loss=lambda output: output.argmax())
    for model in (None, nn.ReLU()):
        with pytest.raises(InvalidArgument, match="expected a module with parameters that need gradients"):
            profiled(model)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="compiled"):
        profiled(torch.compile(linear(), backend="eager"))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, Path]:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    found = profiled(model, optimizer=torch.optim.Adam(model.parameters()))
    path = tmp_path_factory.mktemp("profiles") / "profile.json"
    found.save(path)
    return found, path


def test_a_profile_is_the_same_after_it_was_saved_and_prints_a_table(saved: tuple[Profile, Path]) -> None:
    found, path = saved
    assert Profile.load(path) == found
    lines = str(Profile.load(path)).splitlines()
    assert [line.split()[0] for line in lines] == ["block", "0", "1", "2", "all"]
    assert "batch 3 split, hidden 4 columns" in lines[1]
    assert lines[2].endswith("random")


def test_changed_files_are_refused_with_line_and_key(saved: tuple[Profile, Path], tmp_path: Path) -> None:
    _, path = saved
    whole = json.loads(path.read_text())
    block = whole["blocks"][1]
    wrong: list[tuple[str, Any, str]] = [
        *((key, None, key) for key in block if key != "axes"),
        *((key, -1, key) for key in ("forward", "backward", "recompute", "saved", "output", "parameters")),
        ("forward", 1e300, "forward"), ("saved", 1.5, "saved"), ("saved", True, "saved"),
        ("shape", [-1], "shape"),
        ("name", "0", "document"), ("more", 1, "more"), ("axes", {"batch": {"dims": [0]}}, "axes.batch"),
        ("axes", {"batch": {"dims": [0], "parts": [0], "how": "split"}}, "axes.batch.parts"),
        ("axes", {"batch": {"dims": [0], "parts": [3], "how": "cut"}}, "axes.batch.how"),
    ]  # fmt: skip
    changed = tmp_path / "changed.json"
    for key, value, place in wrong:
        text = json.dumps(
            {**whole, "blocks": [whole["blocks"][0], {**block, key: value}, whole["blocks"][2]]}
        )
        changed.write_text(text)
        with pytest.raises(ConfigError, match=r"^\S*changed\.json:1: ") as error:
            Profile.load(changed)
        assert place in str(error.value), (key, value)
    for key in block.keys() - {"detached", "past", "accumulate"}:  # older files have none
        changed.write_text(json.dumps({**whole, "blocks": [{k: v for k, v in block.items() if k != key}]}))
        with pytest.raises(ConfigError, match=rf"blocks\[0\]\.{key}: missing field"):
            Profile.load(changed)
    line = path.read_text().splitlines().index("  " + json.dumps(block) + ",") + 1
    changed.write_text(path.read_text().replace(json.dumps(block), json.dumps({**block, "forward": -1.0})))
    with pytest.raises(ConfigError, match=rf"changed\.json:{line}: blocks\[1\]\.forward: -1\.0: "):
        Profile.load(changed)
    others: list[Any] = [{**whole, "version": 2}, {**whole, "blocks": []}, {}, [], 3]
    for other in others:
        changed.write_text(json.dumps(other))
        with pytest.raises(ConfigError, match=r"changed\.json:1: (version|blocks)"):
            Profile.load(changed)


def test_cut_and_huge_files_are_refused(saved: tuple[Profile, Path], tmp_path: Path) -> None:
    _, path = saved
    content, cut = path.read_bytes(), tmp_path / "cut.json"
    for end in range(0, len(content) - 2, 149):
        cut.write_bytes(content[:end])
        with pytest.raises(ConfigError, match=r"cut\.json:\d+: "):
            Profile.load(cut)
    with cut.open("r+b") as file:
        file.truncate(1 << 34)
    with pytest.raises(ConfigError, match="is larger than 256 MiB"):
        Profile.load(cut)
    with pytest.raises(ConfigError, match="cannot read"):
        Profile.load(tmp_path)
    with pytest.raises(ConfigError, match="cannot write"):
        saved[0].save(tmp_path)
