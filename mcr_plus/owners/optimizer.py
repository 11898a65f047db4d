"""Steps of an optimizer on whole matrices: gradients to their owners, updates, and weights back to shards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.work import Work
from mcr_plus.errors import InvalidArgument, short
from mcr_plus.owners.matrices import MemoryPlan, OwnedMatrix
from mcr_plus.owners.rounds import Gradients, MatrixRound, SlotPool, digests, local_part, placeholder

TAG: Final = "owned"
_log = logging.getLogger("mcr_plus")


class OwnedOptimizer(torch.optim.Optimizer):
    """Optimizer of sharded matrices that updates each of them whole, on its owner: see `mcr.owned`.

    To schedulers, `zero_grad` and `mcr.wrap` it is an optimizer of the model's parameters. `step` is
    collective over the group: gradients travel to their owners while other matrices are updated. A matrix
    without a gradient on all ranks is left as it is. If the program changes weights between steps, as
    loading a checkpoint does, owners receive them again.
    """

    has_states_of_rank = True  # see `training.parameters.check_elastic`

    def __init__(
        self,
        matrices: Sequence[OwnedMatrix],
        memory: MemoryPlan,
        comm: Communicator,
        kind: Callable[..., torch.optim.Optimizer],
        options: Mapping[str, Any],
    ) -> None:
        self._matrices, self._memory, self._comm = matrices, memory, comm
        self._rank = comm.ranks[comm.rank]
        self._slots = SlotPool()
        self._rounds = [MatrixRound(few, memory, comm, self._slots, TAG) for few in memory.rounds]
        self._kind, self._options = kind, dict(options)
        first = matrices[0]
        sample = self._made([torch.nn.Parameter(placeholder(first.parameter, first.layout.shape))])
        defaults = {name: value for name, value in sample.param_groups[0].items() if name != "params"}
        super().__init__([each.parameter for each in matrices], defaults)
        for each in self._rounds:
            if each.whole:
                each.inner = self._made(list(each.whole.values()))
        self._names = {id(each.parameter): each.name for each in matrices}
        self._weights: list[int] = []
        """Digests of this rank's shards after the last step, none before the first."""
        self._passes: dict[str, int] = {}
        """Number of reductions of each gradient since the last step."""
        self._expected: dict[str, int] | None = None
        """The same number in the step before; None: gradients wait for the step."""
        self._early = 0  # rounds whose gradients travel since the backward pass
        self._starts_early = True

    def _made(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        found = self._kind(parameters, **self._options)
        if not isinstance(found, torch.optim.Optimizer):
            raise InvalidArgument(f"optimizer: expected a class of torch.optim.Optimizer, got {short(found)}")
        if len(found.param_groups) != 1:
            raise InvalidArgument(
                "optimizer: expected one group of parameters; call mcr.owned for each group"
            )
        return found

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the matrices, once; raises `InvalidArgument` later, as owners are chosen for all together."""
        if self.param_groups:
            raise InvalidArgument("add_param_group: call mcr.owned for other matrices, or again for all")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all matrices; returns the loss of the closure.

        Raises:
            InvalidArgument: on all ranks, if only some ranks have the gradient of a matrix.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = self._gradients(self._matrices)
        held, self._weights = self._weights, []  # after an error, owners receive the weights again
        try:
            self._run(self._agree(gradients, held), gradients)
        finally:
            for each in self._rounds:
                each.release()
            self._expected = dict(self._passes) if self._starts_early else None
            self._passes.clear()
            self._early = 0
        self._weights = self._held()
        return loss

    def reduced(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Start to move the gradients of rounds that are complete, in the backward pass.

        A round is complete after as many reductions as in the step before. If another pass changes a
        gradient, or the program clips it, `step` moves the round again.
        """
        for each in parameters:
            name = self._names.get(id(each))
            if name is not None:
                self._passes[name] = self._passes.get(name, 0) + 1
        while self._expected is not None and self._early < min(len(self._rounds), self._memory.ahead):
            one = self._rounds[self._early]
            gradients = self._gradients(one.moved)
            if any(
                each.parameter.grad is None or self._passes.get(each.name, 0) != self._expected.get(each.name)
                for each in one.moved
            ):
                return
            with torch.no_grad():
                one.start(gradients, is_early=True)
            self._early += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the hyperparameters, and the state of the matrices that this rank owns, by name.

        The files of all ranks together are the state of the optimizer: `load_state_dict` takes the part of
        its rank from their union, so that the number of ranks may change.
        """
        state: dict[str, Any] = {}
        for one in self._rounds:
            for name, parameter in one.whole.items():
                if one.inner is not None and parameter in one.inner.state:
                    state[name] = dict(one.inner.state[parameter])
        names = [each.name for each in self._matrices]
        return {"state": state, "param_groups": [{**self._hyperparameters(), "params": names}]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` has returned, of this rank or merged from all.

        Raises:
            InvalidArgument: it has states, but none for a matrix that this rank owns, or it has another form.
        """
        try:
            state, (group,) = state_dict["state"], state_dict["param_groups"]
        except (KeyError, TypeError, ValueError):
            raise InvalidArgument(f"state_dict: expected one of mcr.owned, got {short(state_dict)}") from None
        missing = [name for one in self._rounds for name in one.whole if name not in state]
        if state and missing:
            raise InvalidArgument(
                f"state_dict: has no state of {short(missing)}, which rank {self._rank} owns; merge the "
                "`state` of all ranks' files"
            )
        for one in self._rounds:
            for name, parameter in one.whole.items():
                if state and one.inner is not None:
                    one.inner.state[parameter] = {
                        key: value.detach().to(parameter.device, copy=True)
                        if torch.is_tensor(value)
                        else value
                        for key, value in state[name].items()
                    }
        self.param_groups[0].update({key: value for key, value in group.items() if key != "params"})

    def _hyperparameters(self) -> dict[str, Any]:
        return {name: value for name, value in self.param_groups[0].items() if name != "params"}

    def _gradients(self, matrices: Sequence[OwnedMatrix]) -> Gradients:
        """Return this rank's parts of the gradients."""
        found: dict[str, torch.Tensor | None] = {}
        for each in matrices:
            parameter: Any = each.parameter
            gradient: Any = parameter.grad
            if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
                # For example addends of a sum over ranks that hold the same parameter.
                gradient = gradient.redistribute(placements=parameter.placements)
            shape = each.layout.local_shape(self._rank)
            found[each.name] = None if gradient is None else local_part(gradient, shape)
        return found

    def _held(self) -> list[int]:
        """Return digests of this rank's shards, if owners keep whole weights."""
        if not self._memory.keeps_weights:
            return []
        rank, moved = self._rank, [each for each in self._matrices if not each.is_whole]
        return digests(local_part(each.parameter, each.layout.local_shape(rank)) for each in moved)

    def _agree(self, gradients: Gradients, held: list[int]) -> list[MatrixRound]:
        """Return the rounds with gradients, and start afresh where gradients or weights have changed.

        One all_reduce tells all ranks which gradients exist, which have changed since they were sent, and
        whether weights have since the last step, after which their digests were `held`.
        """
        facts: list[int] = [int(self._held() != held)]
        facts += [int(one.has_changed(gradients)) for one in self._rounds]
        for each in self._matrices:
            has_part = 0 not in (each.layout.local_shape(self._rank) or (0,))
            facts += [int(has_part and (gradients[each.name] is None) is lacks) for lacks in (False, True)]
        common = torch.tensor(facts, dtype=torch.int32, device="cpu")
        self._comm.all_reduce(common, "MAX", compress=False, tag=TAG)
        stale, *found = common.tolist()
        again, found = found[: len(self._rounds)], found[len(self._rounds) :]
        exist = dict(zip(gradients, found[::2], strict=True))
        some = [name for name, lacks in zip(gradients, found[1::2], strict=True) if exist[name] and lacks]
        if some:
            raise InvalidArgument(f"step: only some ranks have the gradients of {short(some)}")
        if any(again) and self._starts_early:
            self._starts_early = False
            _log.warning(
                "owned: gradients changed after they had been sent in the backward pass (clipped, or of "
                "another pass); they are sent in the step from now on"
            )
        for one, has_changed in zip(self._rounds, again, strict=True):
            one.present = {each.name for each in one.matrices if exist[each.name]}
            if has_changed:
                one.release()
        if stale and self._memory.keeps_weights:
            for one in self._rounds:
                one.receive_weights()
        return [one for one in self._rounds if one.present]

    def _run(self, active: Sequence[MatrixRound], gradients: Gradients) -> None:
        """Run the rounds: gradients of the next ones and weights of the last one travel during an update."""
        started = 0
        sending: tuple[MatrixRound, Work | None] | None = None
        for at, one in enumerate(active):
            while started < len(active) and started <= at + self._memory.ahead:
                active[started].start(gradients)
                started += 1
            one.arrive(gradients)
            if one.inner is not None:
                one.inner.param_groups[0].update(self._hyperparameters())
                one.inner.step()
            one.updated()
            if sending is not None:
                _sent(*sending)
            sending = one, one.send()
        if sending is not None:
            _sent(*sending)


def _sent(one: MatrixRound, work: Work | None) -> None:
    if work is not None:
        work.wait()
    one.release()
