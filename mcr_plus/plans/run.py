"""Run a plan: the passes of a step, its transfers and sums, over torch's autograd."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import starmap
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mcr_plus.api.collectives import broadcast_object
from mcr_plus.bucketing.step import model_hash
from mcr_plus.core.kinds import dtype_name
from mcr_plus.errors import InvalidArgument, Unsupported, expect, short
from mcr_plus.job.init import get_rank, get_world_size, world
from mcr_plus.layout.plan import nodes_of
from mcr_plus.layout.redistribute import redistribute
from mcr_plus.plans import checkpoint, sums
from mcr_plus.plans.codecs import check_codecs, is_fed_back, payload_codec
from mcr_plus.plans.cutting import CutModule, cut_module
from mcr_plus.plans.joining import joined_blocks
from mcr_plus.plans.language import ALONG_DATA, ModelPlan, TensorKey
from mcr_plus.plans.moves import moves, open_groups
from mcr_plus.plans.part import ModelPart, drop_parameters
from mcr_plus.plans.plan_file import plan_text
from mcr_plus.plans.proof import PlanTransfer, ProvedPlan, prove
from mcr_plus.plans.slices import PastSlices, SlicePass
from mcr_plus.plans.space import cut_space
from mcr_plus.plans.sums import GradientBucket, OwnParameter, complete, gradient_groups, peers, shared_groups
from mcr_plus.plans.whole import tensors_in


class BlockGraph:
    """Consecutive blocks that a rank runs as one for a micro-batch and slice, with their graph."""

    def __init__(self, blocks: range, micro: int, slice_: int) -> None:
        self.blocks, self.micro, self.slice = blocks, micro, slice_
        self.x: Tensor | None = None
        self.y: Tensor | None = None
        self.dy: Tensor | None = None
        self.past = SlicePass(micro, slice_)
        self.groups: list[dict[str, Any]] = []
        self.trained: list[nn.Parameter] = []
        self.buckets: list[GradientBucket] = []
        self.inside: tuple[slice, ...] = ()  # of the model's input; the first is that of the batch
        self.share = 0.0  # in the loss


def parallelize(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: ModelPlan | ProvedPlan, *,
    loss: Callable[..., Tensor] | None = None,
) -> ParallelModel:  # fmt: skip
    """Return the model as a plan says, for this rank: its blocks, and its parts of them.

    Collective over the job. All ranks pass equal models; the plan is that of rank 0, as ranks measure other
    times. The model and the optimizer are changed: parameters of other ranks move to the meta device, and
    the optimizer has this rank's. Batch norm and other modules without axes run whole.

    Args:
        model: the model of the profile.
        optimizer: of the model, without state yet; with `held` other than `whole`, one that treats elements
            alike, such as SGD and Adam.
        plan: proved, if it is not yet.
        loss: as in `mcr.profile`; the mean over the items of a batch, so that parts add up.

    Raises:
        InvalidArgument: the plan is wrong, or is one of another model or number of ranks.
        Unsupported: the plan cuts a module in a way that is not known.

    Example:
        ```python
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.ones(6, 4), torch.zeros(6, 1)
        loss = torch.nn.functional.mse_loss
        profile = mcr.profile(model, batch, optimizer=optimizer, loss=loss, repeats=1)
        plan = named("data_parallel", profile, mcr.get_world_size())
        parallel = mcr.parallelize(model, optimizer, plan, loss=loss)
        first = parallel.step(batch)  # forward and backward passes; the gradients are summed
        optimizer.step()
        assert parallel.step(batch) < first
        ```
    """
    expect("model", model, nn.Module)
    expect("optimizer", optimizer, torch.optim.Optimizer)
    first = broadcast_object(plan.plan if isinstance(plan, ProvedPlan) else plan, 0)
    if isinstance(plan, ProvedPlan) and plan.plan is first:
        proved = plan
    elif (found := world().attached.get("found")) is None:
        proved = prove(first)
    else:  # simulated ranks take over what an earlier one has proved
        expect("plan", first, ModelPlan)
        proved = found.get(key := ("plan", plan_text(first))) or found.setdefault(key, prove(first))
    if proved.plan.ranks != get_world_size():
        raise InvalidArgument(f"plan: made for {proved.plan.ranks} ranks; the job has {get_world_size()}")
    if optimizer.state:
        raise InvalidArgument("optimizer: it has state already; expected one before its first step")
    own = set(map(id, model.parameters()))
    if any(id(param) not in own for group in optimizer.param_groups for param in group["params"]):
        raise InvalidArgument(
            "optimizer: it has parameters that the model has not; expected one of this model"
        )
    for name, param in model.named_parameters():
        if param.is_meta or (param.numel() and not param.untyped_storage().nbytes()):
            raise InvalidArgument(
                f"model: {name} has no memory, as after an earlier `parallelize`; expected a new model"
            )
    return ParallelModel(model, optimizer, proved, loss)


class ParallelModel:
    """A rank's part of a model under a plan; see `parallelize`.

    Attributes:
        proved: the plan. module: the model. buckets: gradients, as they are added up. optimizer: as given.
        group_names: names of the parameters in each of its groups.
        aliases: other names of shared parameters. persistent: names in the model's plain state dict.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, proved: ProvedPlan,
        loss: Callable[..., Tensor] | None,
    ) -> None:  # fmt: skip
        self.proved, self.module, self.rank = proved, model, get_rank()
        self.plan, self._tensors = proved.plan, proved.tensors
        self._check()
        self._past = PastSlices(model, self.plan)
        self._blocks = [block for block, places in enumerate(self.plan.places) if self.rank in places]
        names = {name for block in self._blocks for name in self.plan.blocks[block].names}
        old = dict(model.named_parameters())
        unused = set(self.plan.profile.unused) & set(old)
        own = {id(param): name for name, param in old.items()}
        every = model.named_parameters(remove_duplicate=False)
        self.aliases = {name: own[id(param)] for name, param in every if name not in old}
        self.persistent = set(model.state_dict(keep_vars=True))
        drop_parameters(model, names | unused)  # every rank keeps those that no block uses, for checkpoints
        self._groups = open_groups(proved)
        self.cut: dict[str, CutModule] = {}
        for block in self._blocks:
            self._cut(block)
        new = {name: self._now(name) for name in old if name in names}
        kept = new | {name: self._now(name) for name in old if name in unused}
        self._parameters = {name: param for name, param in kept.items() if not param.is_meta}
        self.part = ModelPart(model, loss, self.plan.profile)
        given = [list(map(id, group["params"])) for group in optimizer.param_groups]
        groups = {param: number for number, params in enumerate(given) for param in params}
        self.group_names = [[own[param] for param in params if param in own] for params in given]
        self.optimizer = optimizer
        self.copies: dict[int, int] | None = None
        own_params = self._own(old, new, groups)
        self.buckets = sums.make_buckets(own_params, self._groups.gradients, self.plan.codecs.get(0))
        self._optimize(optimizer)
        self._program = list(self._compiled())
        self._made: dict[TensorKey, Tensor] = {}
        self._moving: dict[TensorKey, Any] = {}
        self._sent: deque[tuple[Any, Tensor | None]] = deque()

    # -- set-up ---------------------------------------------------------------------------------------------

    def _check(self) -> None:
        plan = self.plan
        params = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        trained = ((name, param.shape, dtype_name(param.dtype)) for name, param in params)
        if model_hash(trained) != plan.profile.model:
            raise InvalidArgument(
                "model: its parameters have other names, shapes or dtypes than the profile's"
            )
        if shape := plan.blocks[-1].shape:
            raise InvalidArgument(
                f"{plan.blocks[-1].name}: its output is {list(shape)}; expected a `loss` that is a mean"
            )
        modules = self.module.named_modules()
        drops = [name for name, m in modules if "Dropout" in type(m).__name__ and getattr(m, "p", False)]
        if self.module.training and drops and not any(block.random for block in plan.blocks):
            raise Unsupported(f"{drops[0]}: it draws random numbers in training, unlike in the profile")
        check_codecs(self.proved, nodes_of(world()))
        if 0 in plan.codecs:
            for dtype in dict.fromkeys(dtype_name(param.dtype) for _, param in params):
                payload_codec(plan.codecs[0], dtype, world().config.numerics.sums)
        for block, cuts in enumerate(plan.cuts):
            one = plan.blocks[block]
            for cut in cuts:
                how = plan.how(block, cut)
                if how == "gather":
                    raise Unsupported(f"{one.name}: cut along {cut.axes[0]} ({how}); not executed yet")
                if cut.outside and "rows" in cut.axes:
                    raise Unsupported(f"{one.name}: cut along rows; expected it without data `outside`")
                alone = [axis for axis in cut.axes if one.axes[axis].how == "exchange" and not cut.outside]
                if alone:
                    raise Unsupported(f"{one.name}: cut along {alone[0]}; expected it with data `outside`")
            if one.random:
                raise Unsupported(
                    f"{one.name}: it draws random numbers, others than in one process; set its dropout to 0"
                )

    def _now(self, name: str) -> nn.Parameter:
        """Return the parameter that has taken the place of a parameter of the model."""
        module, _, key = name.rpartition(".")
        path = module
        for cut in self.cut:
            if module == cut or module.startswith(f"{cut}."):
                path = f"{cut}.inner{module[len(cut) :]}"
        holder = self.module.get_submodule(path)
        found = getattr(holder, key)
        return cast("nn.Parameter", self.cut[path.partition(".inner")[0]].bias if found is None else found)

    def _cut(self, block: int) -> None:
        plan, one = self.plan, self.plan.blocks[block]
        names = [name for name in one.name.split(" + ") if name != "loss"]
        at = np.argwhere(plan.places[block] == self.rank)
        for axis, cut in enumerate(plan.cuts[block]):
            how = plan.how(block, cut)
            if how == "halo":
                ranks = peers(plan, block, axis, self.rank)
                cut_space(self.module, names, self.proved, block, ranks, self._groups.tasks)
            if not cut.axes or how in ALONG_DATA:
                continue
            own = sorted(set(at[:, 2 + axis].tolist()))
            enter, leave = moves(self.proved, block, axis, self.rank, self._groups.tasks, self._past)
            count = {name: one.axes[name].parts[0] for name in cut.axes}
            group = self._groups.tasks.get(peers(plan, block, axis, self.rank))
            self.cut |= cut_module(self.module, names, cut.axes, count, cut.parts, own, enter, leave, group)

    def _own(
        self, old: dict[str, nn.Parameter], new: dict[str, nn.Parameter], groups: dict[int, int]
    ) -> list[OwnParameter]:
        times, users, found = complete(self.proved), self.plan.profile.users, []
        for name, param in new.items():
            if not param.requires_grad or param.is_meta or id(old[name]) not in groups:
                continue
            blocks, is_cut = users[name], hasattr(param, "mcr_cut")
            if len(blocks) > 1:
                if is_cut:
                    raise Unsupported(
                        f"{name}: several blocks use it, and {self.plan.blocks[blocks[0]].name} cuts it"
                    )
                sums = shared_groups(self.plan, blocks)
            else:
                sums = gradient_groups(self.plan, blocks[0], cut=is_cut)
            ranks = next(ranks for ranks in sums if self.rank in ranks)
            time = max(times[block] for block in blocks)
            found.append(OwnParameter(param, ranks, time, self.plan.held[blocks[0]], groups[id(old[name])]))
        return sorted(found, key=lambda each: each.time)

    def _optimize(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer this rank's parameters in place of the model's."""
        for group in optimizer.param_groups:
            group["params"] = []
        for bucket in self.buckets:
            optimizer.param_groups[bucket.group]["params"] += bucket.optimized
        sharded = [bucket for bucket in self.buckets if bucket.held == "optimizer"]
        if sharded:
            optimizer.register_step_post_hook(partial(_gather, sharded))

    # -- program --------------------------------------------------------------------------------------------

    def _compiled(self) -> Sequence[Callable[[], None]]:
        """Return the rank's program as bound calls."""
        joined = joined_blocks(self.proved, self.rank)
        graphs: dict[tuple[int, int, int], BlockGraph] = {}
        keyed: list[tuple[tuple[float, int], Callable[[], None]]] = []
        for at, item in self.proved.program(self.rank):
            if isinstance(item, PlanTransfer):
                keyed.append((at, partial(self._move, item, self._redistribution(item))))
                continue
            first, last = joined[item]
            if item.block != (first if item.kind == "F" else last):
                continue  # it runs with another block
            key = first, item.micro, item.slice
            if item.kind == "F":
                graphs[key] = self._bound(BlockGraph(range(first, last + 1), item.micro, item.slice))
            run = {"F": self._forward, "B": self._backward, "W": self._weights}[item.kind]
            keyed.append((at, partial(_with_parameters, run, graphs[key])))
        keyed += [((bucket.time, 0), bucket.start) for bucket in self.buckets]
        keyed.sort(key=lambda pair: pair[0])
        return [call for _, call in keyed]

    def _bound(self, graph: BlockGraph) -> BlockGraph:
        """Set what the graph of every step has in common."""
        first, at = graph.blocks.start, (graph.micro, graph.slice, self.rank)
        unit = self._tensors.whole_shape(first)[0] // self.plan.profile.input[0]
        low, high = self._tensors.rows(first, *at)
        box = self._tensors.box(first, "input", *at)[1:]
        graph.inside = (slice(low // unit, high // unit), *starmap(slice, box))
        graph.share = self._tensors.share(graph.blocks[-1], *at)
        names = dict.fromkeys(
            name for block in graph.blocks for name in sorted(self.plan.blocks[block].names)
        )
        own = [self._parameters[name] for name in names if name in self._parameters]
        graph.trained = [param for param in own if param.requires_grad]
        trained = set(map(id, graph.trained))
        sharded = [bucket for bucket in self.buckets if bucket.held == "parameters"]
        graph.buckets = [each for each in sharded if not trained.isdisjoint(map(id, each.params))]
        return graph

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters by their names in the model; they may be parts (see `checkpoint`)."""
        return self._parameters

    state_dict = checkpoint.state_dict
    load_state_dict = checkpoint.load_state_dict
    optimizer_state_dict = checkpoint.optimizer_state_dict
    load_optimizer_state_dict = checkpoint.load_optimizer_state_dict
    clip_grad_norm_ = sums.clip_grad_norm_

    # -- step -----------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> Tensor:
        """Run the passes of a step; return the loss of the whole batch, the same on all ranks.

        The gradients of the parameters are those of this loss, complete on return. Gradients of a step
        before are overwritten.

        Args:
            batch: the whole batch, as for `mcr.profile`, the same on all ranks; a rank uses its rows.

        Raises:
            InvalidArgument: the batch has another number of items than the plan's.
        """
        items = self.plan.profile.input[0]
        shapes = [list(tensor.shape) for tensor in tensors_in(batch)]
        if not any(shape[:1] == [items] for shape in shapes):
            raise InvalidArgument(f"batch: shapes {short(shapes)}; the plan is for {items} items")
        for bucket in self.buckets:
            bucket.reset()
        self._loss: Tensor | None = None
        self._batch = batch
        for kept in (self._made, self._moving, self._past.kept):
            kept.clear()  # of a step that has failed, and of blocks without a backward pass
        for call in self._program:
            call()
        self._batch = None
        while self._sent:
            self._sent.popleft()[0].wait()
        for bucket in self.buckets:
            bucket.wait()
        return self._whole_loss()

    def _whole_loss(self) -> Tensor:
        last = len(self.plan.blocks) - 1
        loss = torch.zeros((), dtype=torch.float64, device="cpu")
        firsts = gradient_groups(self.plan, last, cut=False)[0]  # one of its replicas
        if self._loss is not None and self.rank in firsts:
            loss += self._loss.cpu()
        world().all_reduce(loss, tag="plan.loss", compress=False)
        return loss

    def _rows(self, graph: BlockGraph) -> Any:
        """Return the rows of the batch that a graph reads; of the model's input also the box within them."""
        first, given, inside = graph.blocks.start, self.plan.profile.input, graph.inside

        def part(each: Any) -> Any:
            if not isinstance(each, Tensor) or not each.ndim or len(each) != given[0]:
                return each
            whole = not first and tuple(each.shape) == given
            return each[inside] if whole else each[inside[0]]

        batch = self._batch
        if ends := self.plan.slice_ends:
            begin, end = (0, *ends)[graph.slice : graph.slice + 2]
            batch = cast("Any", self.module).mcr_slice(batch, begin, end)
        return tree_map(part, batch)

    def _run(self, graph: BlockGraph) -> Tensor:
        self._past.now, graph.past.roots = graph.past, []
        return self.part.run(graph.blocks, graph.x, self._rows(graph))

    def _forward(self, graph: BlockGraph) -> None:
        first, last = graph.blocks[0], graph.blocks[-1]
        alone = self.plan.blocks[last].detached
        if first:
            x = self._take((first, graph.micro, graph.slice, False))
            graph.x = x.requires_grad_(not self.plan.blocks[first - 1].detached)
        again = self.plan.recomputed[first] or alone
        with torch.set_grad_enabled(not again):
            y = self._run(graph)
        is_loss = last == len(self.plan.blocks) - 1
        if is_loss:
            part = y.detach().double() * graph.share
            self._loss = part if self._loss is None else self._loss + part
        else:
            expected = self._tensors.end(last, "output", graph.micro, graph.slice).local_shape(self.rank)
            if tuple(y.shape) != expected:
                raise Unsupported(
                    f"{self.plan.blocks[last].name}: its output is {list(y.shape)}; by the profile {expected}"
                )
            self._made[last + 1, graph.micro, graph.slice, False] = y.detach()
        graph.y = None if again else y
        graph.x = None if alone else graph.x

    def _backward(self, graph: BlockGraph) -> None:
        last = graph.blocks[-1]
        if graph.y is None:
            graph.y = self._run(graph)
        if last == len(self.plan.blocks) - 1:
            graph.dy = torch.full_like(graph.y, graph.share)
        else:
            graph.dy = self._take((last + 1, graph.micro, graph.slice, True))
        if self.plan.split[last]:
            self._input_alone(graph)
        elif graph.y.requires_grad:  # else its parameters are frozen, and nothing is before it
            roots, gradients = graph.past.gradients()
            torch.autograd.backward([graph.y, *roots], [graph.dy, *gradients])
        graph.past.end()
        if graph.x is not None and graph.x.requires_grad:
            assert graph.x.grad is not None
            self._made[graph.blocks[0], graph.micro, graph.slice, True] = graph.x.grad
        if not self.plan.split[last]:
            graph.x = graph.y = graph.dy = None

    def _input_alone(self, graph: BlockGraph) -> None:
        from torch.distributed.pipelining._backward import stage_backward_input

        if graph.x is None or not graph.x.requires_grad:
            return  # all of it is left for W
        assert graph.y is not None
        assert graph.dy is not None
        if graph.y._is_view():
            graph.y = graph.y.clone()  # it is detached in place
        _, graph.groups = stage_backward_input([graph.y], [graph.dy], [graph.x], iter(graph.trained))

    def _weights(self, graph: BlockGraph) -> None:
        from torch.distributed.pipelining._backward import stage_backward_weight

        assert graph.y is not None
        if graph.x is None or not graph.x.requires_grad:
            if graph.y.requires_grad:
                torch.autograd.backward(graph.y, graph.dy)
        else:
            stage_backward_weight(iter(graph.trained), graph.groups)
        graph.x = graph.y = graph.dy = None
        graph.groups = []

    def _redistribution(self, transfer: PlanTransfer) -> Callable[[Tensor | None], Any]:
        codec, tag = self.plan.codecs.get(transfer.tensor), transfer.tag
        if is_fed_back(codec):
            tag = f"{tag}.{transfer.tensor}"  # residuals belong to a tag
        return partial(
            redistribute, source=transfer.made, target=transfer.needed, tag=tag, compress=codec,
            dtype=getattr(torch, self.plan.blocks[transfer.tensor - 1].dtype),
            group=self._groups.transfers[transfer.ranks], async_op=True,
        )  # fmt: skip

    def _move(self, transfer: PlanTransfer, redistribution: Callable[[Tensor | None], Any]) -> None:
        """Begin a transfer."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        key = transfer[:4]
        x = self._made.pop(key, None)
        work = redistribution(x)
        if self.rank in transfer.needed.locals:
            self._moving[key] = work
        else:
            self._sent.append((work, x))

    def _take(self, key: TensorKey) -> Tensor:
        """Return what a task of this rank needs of a tensor."""
        tensor, micro, slice_, gradient = key
        if key in self._moving:
            work = self._moving.pop(key)
            work.wait()
            return work.output  # type: ignore[no-any-return]
        made = self._made.pop(key)
        ends = (self._tensors.gradients if gradient else self._tensors.values)(tensor, micro, slice_)
        (own,), (needed,) = ends.made.pieces(self.rank), ends.needed.pieces(self.rank)
        lows = ends.needed.held.lows[needed] - ends.made.held.lows[own]
        highs = ends.needed.held.highs[needed] - ends.made.held.lows[own]
        return made[tuple(map(slice, lows.tolist(), highs.tolist()))].contiguous().detach()


def _gather(buckets: Sequence[GradientBucket], *_: Any) -> None:
    for bucket in buckets:
        bucket.gather()


def _with_parameters(run: Callable[[BlockGraph], None], graph: BlockGraph) -> None:
    """Run a pass of a graph with whole parameters, where they are in shards."""
    _gather(graph.buckets)
    run(graph)
    for bucket in graph.buckets:
        bucket.drop()
