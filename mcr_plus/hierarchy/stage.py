"""hierarchical: an operation of several nodes as steps inside the nodes, and between them.

    all_reduce    reduce_scatter in the node, all_reduce of each part between nodes, all_gather in the node
    broadcast     scatter in the root's node, broadcast of each part between nodes, all_gather in the node
    all_to_all    exchange between ranks of the same local index, then exchange in the node

So every value crosses the link once for a node, not once for each of its ranks. The first is that of Horovod
(hierarchical allreduce), Blink (Wang et al., MLSys 2020) and NCCL; the last that of DeepSpeed-MoE
(Rajbhandari et al., ICML 2022) and of MSCCL's two-step algorithm.

Why this cannot deadlock: a step waits for the step before it of the same operation, and in its lane for the
same step of operations before it (`in` and `back` are groups of their own). Both come earlier in the order of
operations and steps, which is the same on all ranks, so there is no cycle; and any wait lets all advance.
"""

from __future__ import annotations

from collections.abc import Mapping

from mcr_plus.backends import backend_class, supposed
from mcr_plus.compression.choice import NOT_CHOSEN, chosen, refusal
from mcr_plus.compression.pool import Pool
from mcr_plus.config import CompressOptions, DispatchOptions, HierarchicalOptions, codec_of, plain_options
from mcr_plus.hierarchy.nodes import Nodes, inner_groups, nodes_of
from mcr_plus.hierarchy.ways import AllReduce, AllToAll, Broadcast, Way
from mcr_plus.interfaces import Context, Issue, Next
from mcr_plus.message import Group, Signature, frozen
from mcr_plus.pipeline import Pipeline
from mcr_plus.units import format_size

_WAYS: dict[str, type[Way]] = {"all_reduce": AllReduce, "all_to_all": AllToAll, "broadcast": Broadcast}


class HierarchicalStage:
    """Takes operations through the nodes; what it leaves alone goes the flat way, and `explain` says why.

    An operation for which the call or a rule names a backend goes there as it is. Steps in a node are never
    compressed. The step between nodes gets the codec of the call, of `inter`, or that which the compress
    stage has for it.
    """

    def __init__(self, options: HierarchicalOptions, context: Context) -> None:
        self._options = options
        self._context = context
        self._config = context.config
        self._nodes = nodes_of(context.config, context.world.hosts, context.group)
        self._parts = _pipelines(context)
        dispatch = context.config.options("dispatch")
        self._always_tell = isinstance(dispatch, DispatchOptions) and dispatch.check == "every"
        self._explains = context.runtime is None
        self._pool = Pool()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that this stage keeps."""
        return self._pool.nbytes

    def bind(self, signature: Signature, next: Next) -> Issue:
        """Bind to the steps, or to the operation itself."""
        flat = signature.replace(compress=False) if signature.compress == NOT_CHOSEN else signature
        if signature.kind not in self._options.kinds or not signature.nbytes:
            return next(flat)
        way = self._way(signature)
        if isinstance(way, str):
            next.note(f"not in steps: {way}")
            return next(flat)
        remark = f"; {way.remark}" if way.remark else ""
        next.note(f"{way.nodes.count} nodes of {way.nodes.size} ranks: {way.says}{remark}")
        way.bind(lambda part, wanted: next.through(self._parts[part], wanted), next)
        return way.issue if self._explains else way.told(next, always=self._always_tell)

    def _way(self, signature: Signature) -> Way | str:
        """The steps of an operation; or why it goes the flat way."""
        if isinstance(self._nodes, str):
            return self._nodes
        if (reason := self._refusal(signature, self._nodes)) is not None:
            return reason
        way = _WAYS[signature.kind](signature, self._nodes, self._pool)
        local, inter = self._options.local.backend, self._options.inter.backend
        for part, step in way.steps.items():
            named = {"backend": inter} if part == "across" else {"backend": local, "compress": False}
            way.steps[part] = step.replace(**named)
        return self._encode(way) or self._lacking(way) or way

    def _refusal(self, signature: Signature, nodes: Nodes) -> str | None:
        """Why an operation is not for steps."""
        assert signature.nbytes is not None
        assert signature.dtype is not None
        if signature.backend is not None:
            return f"backend {signature.backend} is named by the call or a rule"
        if signature.nbytes < self._options.min:
            return f"{format_size(signature.nbytes)} is less than {format_size(self._options.min)}"
        if signature.nbytes // signature.dtype.itemsize < nodes.size:
            return f"fewer elements than the {nodes.size} ranks of a node"
        return None

    def _encode(self, way: Way) -> str | None:
        """Settle the codec of the step between nodes; or say why the operation must go the flat way."""
        own, across = self._options.inter.compress, way.steps["across"]
        by_call = way.signature.compress not in (None, NOT_CHOSEN)
        if own is not None and not by_call:
            why_not = None if own.codec == "none" else refusal(codec_of(own), own, across)
            used = own.codec != "none" and why_not is None
            if why_not is not None:
                way.remark = f"codec {own.codec} not used between nodes: {why_not}"
            way.steps["across"] = across.replace(compress=frozen(plain_options(own)) if used else False)
        else:
            compress = way.signature.compress if by_call or way.signature.compress is None else False
            way.steps["across"] = across = across.replace(compress=compress)
            whole, part = (chosen(self._config, each) for each in (way.signature, across))
            if whole is not None and _takes(whole, way.signature) and not _takes(whole, across):
                return f"codec {whole.codec} takes it as a whole, but not its parts"
            used = part is not None and _takes(part, across)
        if used:
            way.encode()
        return None

    def _lacking(self, way: Way) -> str | None:
        """What a backend that the configuration names cannot do."""
        for part, step in way.steps.items():
            if step.backend is None:
                continue
            name, _, algorithm = step.backend.partition(":")
            if why := self._unreached(name, part, way.nodes):
                return f"backend {name} cannot do a step: {why}"
            if part == "across" and step.compress:
                if algorithm:
                    return f"backend {step.backend}: a codec makes other operations of the step"
                continue
            support = backend_class(name).supports(step.replace(backend=name, algorithm=algorithm or None))
            if not support:
                return f"backend {step.backend} cannot do {step.kind}: {support.how}"
        return None

    def _unreached(self, name: str, part: str, nodes: Nodes) -> str:
        """Why a backend does not reach the groups of a step, of whatever node, so that all ranks agree."""
        reaches = getattr(backend_class(name), "reaches", None)
        if reaches is None:
            return ""
        group, world = self._context.group, self._context.world
        for members in nodes.groups(part):
            inner = Group(f"{group.name}/{part}", tuple(group.ranks[each] for each in members), 0)
            if reason := reaches(world, inner):
                return str(reason)
        return ""


def _takes(options: CompressOptions, signature: Signature) -> bool:
    return refusal(codec_of(options), options, signature) is None


def _pipelines(context: Context) -> Mapping[str, Pipeline]:
    """The pipelines of the groups that steps run in; without a job they only explain."""
    if context.parts:
        explains = context.runtime is None
        return {part: each.explaining if explains else each for part, each in context.parts.items()}
    groups = inner_groups(context.config, context.world.hosts, context.group)
    below, world = context.config.below("hierarchical"), context.world
    return {
        part: Pipeline(Context(below, world, group, supposed(below.backends, world, group)))
        for part, group in groups.items()
    }
