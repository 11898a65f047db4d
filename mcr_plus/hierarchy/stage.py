"""Stage `hierarchical`: decomposes an operation into steps inside nodes and between nodes.

    all_reduce      reduce_scatter in the node, all_reduce of each part between nodes, all_gather in the node
    broadcast       scatter in the root's node, broadcast of each part between nodes, all_gather in the node;
                    of payloads if receivers of the codec keep values (`forward`)
    all_gather      between ranks of the same local index, then in the node
    reduce_scatter  in the node, then between ranks of the same local index
    all_to_all      exchange between ranks of the same local index, then exchange in the node

Every value crosses the link once per node, not once per rank. Horovod (hierarchical allreduce), Blink (Wang
et al., MLSys 2020) and NCCL use the same all_reduce; DeepSpeed-MoE (Rajbhandari et al., ICML 2022) and the
two-step algorithm of MSCCL use the same all_to_all.

This cannot deadlock. A step waits for the previous step of the same operation, and, in its queue, for the
same step of earlier operations (`intra` and `intra2` are separate groups). Both come earlier in the order of
operations and steps. This order is the same on all ranks, so there is no cycle, and any wait advances all
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from mcr_plus.backends import assumed_backends, backend_class
from mcr_plus.config.options import plain_options
from mcr_plus.core.buffers import Pool
from mcr_plus.core.group import Group
from mcr_plus.core.kinds import dtype_name
from mcr_plus.core.message import Signature, frozen
from mcr_plus.core.units import format_size
from mcr_plus.hierarchy.nodes import Nodes, Part, inner_groups, may_have_nodes, nodes_of
from mcr_plus.hierarchy.options import HierarchicalOptions
from mcr_plus.hierarchy.policy import codec_between
from mcr_plus.pipeline.pipeline import Pipeline
from mcr_plus.pipeline.stage import Context, Issue, Next, Stage
from mcr_plus.pipeline.treatment import NO_CODEC, Treatment

if TYPE_CHECKING:
    from mcr_plus.hierarchy.decompose import Decomposition


class HierarchicalStage(Stage):
    """Stage that decomposes operations by nodes; `explain` prints why an operation stays flat.

    An operation is not decomposed if the call or a rule names a backend for it. Steps in a node are never
    compressed. The step between nodes gets the first of these codecs: from the call, from `inter`, from the
    compress stage.
    """

    Options = HierarchicalOptions

    def __init__(self, options: HierarchicalOptions, context: Context) -> None:
        self._options = options
        self._context = context
        self._nodes = nodes_of(context.config, context.world.hosts, context.group)
        self._parts = _pipelines(context)
        self._explains = context.runtime is None
        self._pool = Pool()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers of this stage."""
        return self._pool.nbytes

    def bind(self, signature: Signature, next: Next) -> Issue:
        """Bind the steps, or the whole operation if it is not decomposed."""
        flat = signature.replace(compress=False) if signature.compress == NO_CODEC else signature
        if signature.kind not in self._options.kinds or not signature.nbytes:
            return next(flat)
        steps = self._decomposition(signature, next)
        if isinstance(steps, str):
            if may_have_nodes(self._context.config, self._context.world.hosts):
                next.note(f"not in steps: {steps}")
            return next(flat)
        remark = f"; {steps.remark}" if steps.remark else ""
        next.note(f"{steps.nodes.count} nodes of {steps.nodes.size} ranks: {steps.summary}{remark}")
        steps.bind(lambda part, step: next.through(self._parts[part], step), next)
        if self._explains:
            return Issue(steps.start)
        return steps.announced(next, always=next.treatment(signature).compared)

    def treatment(self, signature: Signature, rest: Callable[[Signature], Treatment]) -> Treatment:
        """Return the treatment by later stages, including the state of a codec between nodes."""
        treatment, between = rest(signature), codec_between(self._options)
        if between is None:
            return treatment
        inter = rest(signature.replace(compress=frozen(plain_options(between))))
        return replace(treatment, keeps=treatment.keeps or inter.keeps)

    def _decomposition(self, signature: Signature, next: Next) -> Decomposition | str:
        """Return the steps of an operation, or the reason why it stays flat."""
        if isinstance(self._nodes, str):
            return self._nodes
        if (reason := self._refusal(signature, self._nodes)) is not None:
            return reason
        from mcr_plus.hierarchy.decompose import DECOMPOSITIONS  # imported here: most jobs have one node

        steps = DECOMPOSITIONS[signature.kind](signature, self._nodes, self._pool)
        local, inter = self._options.local.backend, self._options.inter.backend
        for part, step in steps.steps.items():
            named = {"backend": inter} if part == "inter" else {"backend": local, "compress": False}
            steps.steps[part] = step.replace(**named)
        if (reason := self._choose_codec(steps, next)) is not None:
            return reason
        compress = steps.steps["inter"].compress
        treatment = next.treatment(steps.steps["inter"])
        if signature.sums is not None and treatment.codec is not None:
            return f"sums: {signature.sums} with a codec has an order over all ranks"
        if signature.kind == "broadcast" and treatment.forwards and treatment.compress is not False:
            whole = signature.replace(compress=treatment.compress if compress is None else compress)
            from mcr_plus.hierarchy.forward import ForwardedBroadcast

            steps = ForwardedBroadcast(whole, self._nodes, self._pool)
            for part, step in steps.steps.items():
                steps.steps[part] = step.replace(backend=inter if part == "inter" else local)
        return self._unsupported(steps) or steps

    def _refusal(self, signature: Signature, nodes: Nodes) -> str | None:
        """Return the reason why an operation is not decomposed; None if it is decomposed."""
        assert signature.nbytes is not None
        assert signature.dtype is not None
        if signature.backend is not None:
            return f"backend {signature.backend} is named by the call or a rule"
        # A half type's sum of a node would be rounded, as would an exact one.
        if signature.sums == "exact" or (signature.sums == "fixed" and signature.dtype.itemsize == 2):
            return f"sums: {signature.sums} of {dtype_name(signature.dtype)} is rounded once, over all ranks"
        if signature.sums is not None and not nodes.are_subtrees:
            return f"sums: {signature.sums} is a tree over all ranks, of which nodes are no parts"
        if signature.device == "cuda" and self._options.names_nothing:
            return "CUDA's libraries know the hosts; name `nodes`, `local` or `inter` for steps"
        if signature.nbytes < self._options.min:
            return f"{format_size(signature.nbytes)} is less than {format_size(self._options.min)}"
        if signature.nbytes // signature.dtype.itemsize < nodes.size:
            return f"fewer elements than the {nodes.size} ranks of a node"
        return None

    def _choose_codec(self, steps: Decomposition, next: Next) -> str | None:
        """Set the codec of the step between nodes; return the reason if the operation must stay flat."""
        own, whole, inter = self._options.inter.compress, steps.signature, steps.steps["inter"]
        by_call = whole.compress not in (None, NO_CODEC)
        if own is not None and not by_call:
            inter = inter.replace(compress=frozen(plain_options(own)) if own.codec != "none" else False)
            treatment = next.treatment(inter)
            if treatment.refusal is not None:
                steps.remark = f"codec {own.codec} not used between nodes: {treatment.refusal}"
                inter = inter.replace(compress=False)
        else:
            inter = inter.replace(compress=False if whole.compress == NO_CODEC else whole.compress)
            treatment, of_whole = next.treatment(inter), next.treatment(whole)
            if of_whole.codec is not None and of_whole.refusal is None:
                part = inter.replace(compress=of_whole.compress)
                if next.treatment(part).refusal is not None:
                    return f"codec {of_whole.codec} supports the whole operation, but not its parts"
        steps.steps["inter"] = inter
        if treatment.codec is not None and treatment.refusal is None:
            steps.prepare_for_codec()
        return None

    def _unsupported(self, steps: Decomposition) -> str | None:
        """Return the reason why a configured backend cannot run its step, None if all backends can."""
        for part, step in steps.steps.items():
            if step.backend is None:
                continue
            name, _, algorithm = step.backend.partition(":")
            if why := self._unavailable(name, part, steps.nodes):
                return f"backend {name} cannot do a step: {why}"
            if part == "inter" and step.compress:
                if algorithm:
                    return (
                        f"backend {step.backend}: compression decomposes the step, "
                        "so a named algorithm cannot be applied to it"
                    )
                continue
            support = backend_class(name).supports(step.replace(backend=name, algorithm=algorithm or None))
            if not support:
                return f"backend {step.backend} cannot do {step.kind}: {support.how}"
        return None

    def _unavailable(self, name: str, part: Part, nodes: Nodes) -> str:
        """Return the reason why a backend is unavailable for the groups of a step, '' if it is available.

        The groups of all ranks are checked, so that all ranks agree.
        """
        group, world = self._context.group, self._context.world
        for members in nodes.groups(part):
            inner = Group(f"{group.name}/{part}", tuple(group.ranks[member] for member in members), 0)
            if reason := backend_class(name).unavailable_for(world, inner):
                return reason
        return ""


def _pipelines(context: Context) -> Mapping[str, Pipeline]:
    """Return the pipelines of the steps' groups; without a job, pipelines for `explain` only."""
    if context.parts:
        explains = context.runtime is None
        return {part: each.explaining if explains else each for part, each in context.parts.items()}
    groups = inner_groups(context.config, context.world.hosts, context.group)
    below, world = context.config.below("hierarchical"), context.world
    return {
        part: Pipeline(Context(below, world, group, assumed_backends(below.backends, world, group)))
        for part, group in groups.items()
    }
