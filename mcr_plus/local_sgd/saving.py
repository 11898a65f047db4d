"""Save and restore the state of outer steps."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from mcr_plus.errors import InvalidArgument, PeerLost, Revoked
from mcr_plus.local_sgd.fragments import OuterUpdate

if TYPE_CHECKING:
    from mcr_plus.local_sgd.local import LocalSteps

_VERSION: Final = 1


def saved(local: LocalSteps) -> dict[str, Any]:
    """Return the state, see `LocalSteps.state_dict`."""
    local.catch_up()
    fragments = []
    for fragment in local.fragments:
        arrived = None
        if fragment.flight is not None:
            try:
                mean = local.arrived(fragment)
                arrived = {"due": fragment.flight.due, "mean": mean, "tokens": fragment.flight.tokens}
            except (PeerLost, Revoked):  # the world no longer exists: the steps count as unsent
                assert fragment.flight is None
        fragments.append(
            {
                "layout": fragment.layout,
                "anchor": fragment.anchor,
                "outer": fragment.optimizer.state_dict(),
                "optimizer": type(fragment.optimizer).__name__,
                "rounds": fragment.rounds,
                "tokens": fragment.tokens,
                "residual": fragment.residual,
                "arrived": arrived,
            }
        )
    return {
        "version": _VERSION,
        "every": local.settings.every,
        "steps": local.steps,
        "position": local.position,
        "rounds": local.rounds,
        "own_every": local.every,
        "fragments": fragments,
    }


def restore(local: LocalSteps, state: Mapping[str, Any]) -> None:
    """Load a state, see `LocalSteps.load_state_dict`."""
    if not isinstance(state, Mapping) or state.get("version") != _VERSION or "fragments" not in state:
        raise InvalidArgument("state: expected what state_dict() of mcr.local's result returned")
    theirs = [each["layout"] for each in state["fragments"]]
    ours = [fragment.layout for fragment in local.fragments]
    if theirs != ours:
        raise InvalidArgument(f"state: {_difference(theirs, ours)}")
    for fragment, each in zip(local.fragments, state["fragments"], strict=True):
        own = type(fragment.optimizer).__name__
        # torch accepts the state of another class, whose step then fails.
        if each.get("optimizer", own) != own:
            raise InvalidArgument(
                f"state: its outer optimizer is {each['optimizer']}, that of this mcr.local is {own}; "
                "expected the same"
            )
    if state["every"] != local.settings.every and state["position"]:
        raise InvalidArgument(
            f"state: {state['position']} steps into a window of {state['every']}, which has "
            f"{local.settings.every} now; expected the same every, or a state from the end of a window"
        )
    local.steps, local.position, local.rounds = state["steps"], state["position"], state["rounds"]
    same = state["every"] == local.settings.every
    local.every = local._next_every = state["own_every"] if same else local.settings.every
    local.forget_weights()
    for fragment, each in zip(local.fragments, state["fragments"], strict=True):
        fragment.anchor.copy_(each["anchor"])
        fragment.load_outer(copy.deepcopy(each["outer"]))  # torch would keep references to its tensors
        fragment.rounds, fragment.tokens = each["rounds"], each["tokens"]
        residual, arrived = each["residual"], each["arrived"]
        fragment.residual = None if residual is None else residual.clone()
        fragment.flight = None
        if arrived is not None:
            fragment.flight = OuterUpdate(arrived["due"], arrived["mean"].clone(), arrived["tokens"])


def _difference(theirs: list[list[list[Any]]], ours: list[list[list[Any]]]) -> str:
    if len(theirs) != len(ours):
        return f"it has {len(theirs)} fragments, and the model is cut into {len(ours)}; pass as many"
    for index, (saved_, here) in enumerate(zip(theirs, ours, strict=True)):
        for (name, shape), (other, size) in zip(saved_, here, strict=False):
            if (name, shape) != (other, size):
                there, here_ = f"'{name}' of shape {shape}", f"'{other}' of shape {size}"
                return f"fragment {index} has {there} in the state, and {here_} in the model"
    return "its fragments are cut elsewhere; expected those of the same model and number of fragments"
