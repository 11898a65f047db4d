"""Files of plans and profiles: written and read again, and refused if something is wrong."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plan_blocks import ITEMS, LENGTH, WIDTH, chain, layer

from mcr_plus.errors import ConfigError, InvalidArgument
from mcr_plus.plans.blocks import Axis, How, Profile
from mcr_plus.plans.language import ModelPlan, PlanTask
from mcr_plus.plans.named import NAMED, hybrid, named, terapipe
from mcr_plus.plans.plan_file import load_plan, save_plan
from mcr_plus.plans.proof import prove

Document = dict[str, Any]


def everything() -> Profile:
    """Return blocks with every axis that a plan's name needs."""
    blocks = [layer(number, kind="Linear") for number in range(6)]
    cuts: tuple[tuple[int, str, How], ...]
    cuts = (1, "hidden", "columns"), (2, "experts", "exchange"), (3, "tables", "exchange")
    for number, axis, how in cuts:
        axes = {**blocks[number].axes, axis: Axis(dims=(), parts=(WIDTH if number == 1 else 4,), how=how)}
        del axes["heads"]
        blocks[number] = blocks[number].model_copy(update={"axes": axes})
    return chain(blocks)


def same(one: ModelPlan, two: ModelPlan) -> bool:
    """Return whether two plans are equal, and so are their proofs."""
    fields = ("name", "ranks", "micro_batches", "slices", "slice_ends", "cuts", "recomputed", "split", "held")
    first, second = prove(one), prove(two)
    return (
        all(getattr(one, name) == getattr(two, name) for name in fields)
        and all((a == b).all() for a, b in zip(one.places, two.places, strict=True))
        and [one.order_of(rank) for rank in range(one.ranks)] == [two.order_of(r) for r in range(two.ranks)]
        and one.befores == two.befores
        and first.runs == second.runs
        and [each[:4] for each in first.transfers] == [each[:4] for each in second.transfers]
    )


# -- plans ---------------------------------------------------------------------------------------------------


def test_every_named_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    profile, path, written = everything(), tmp_path / "plan.json", set()
    for name in NAMED:
        for ranks in (2, 3):
            try:
                prove(plan := named(name, profile, ranks, micro_batches=2))
            except InvalidArgument:
                continue
            save_plan(plan, path)
            assert same(plan, load_plan(path, profile)), (name, ranks)
            written.add(name)
    assert written == NAMED.keys() - {"interlaced"}  # it needs an embedding and a head


def test_what_is_in_no_named_plan_is_written_too(tmp_path: Path) -> None:
    """Slices of different lengths, pairs of tasks, blocks that are recomputed, and cuts outside."""
    profile, path = chain([layer(number) for number in range(4)]), tmp_path / "plan.json"
    sliced = terapipe(profile, 2, slices=[4, 3, 1])
    mixed = hybrid(
        profile, 4, data=2, tensor=2, micro_batches=2, outside="sequence", held="optimizer", recompute=[1, 3]
    )
    mixed.before(PlanTask(0, 0, 0, "F"), PlanTask(1, 1, 0, "F"))
    for plan in (sliced, mixed):
        save_plan(plan, path)
        assert same(plan, load_plan(path, profile))
    assert load_plan_slices(sliced, path, profile) == [4, 7, 8]


def load_plan_slices(plan: ModelPlan, path: Path, profile: Profile) -> list[int]:
    save_plan(plan, path)
    return load_plan(path, profile).slice_ends


def place(document: Document, block: int = 0) -> list[Any]:
    found: list[Any] = document["blocks"][block]["places"]
    return found


WRONG: dict[str, Callable[[Document], Any]] = {
    "version": lambda d: d.update(version=2),
    "no version": lambda d: d.pop("version"),
    "model": lambda d: d.update(model="another"),
    "one block less": lambda d: d["blocks"].pop(),
    "one field more": lambda d: d.update(more=1),
    "negative ranks": lambda d: d.update(ranks=-1),
    "more micro-batches than items": lambda d: d.update(micro_batches=ITEMS + 1),
    "negative slices": lambda d: d.update(slices=[-1, LENGTH + 1]),
    "slices too long": lambda d: d.update(slices=[LENGTH, 1]),
    "a place less": lambda d: place(d).pop(),
    "a place more": lambda d: place(d).append(0),
    "no rank": lambda d: place(d).__setitem__(0, -1),
    "negative rank": lambda d: place(d).__setitem__(0, -2),
    "rank outside": lambda d: place(d).__setitem__(0, 2),
    "rank of 80 bits": lambda d: place(d).__setitem__(0, 1 << 80),
    "text as rank": lambda d: place(d).__setitem__(0, "0"),
    "fewer ranks": lambda d: d.update(ranks=1),
    "more ranks": lambda d: d.update(ranks=3),
    "unknown axis": lambda d: d["blocks"][0].update(cuts=[[["depth"], 1, None]]),
    "too many parts": lambda d: d["blocks"][0].update(cuts=[[["heads"], 64, None]], places=[0] * 128),
    "parts beyond memory": lambda d: d["blocks"][0].update(cuts=[[[], 1 << 20, None]] * 4),
    "unknown holding": lambda d: d["blocks"][0].update(held="nowhere"),
    "task dropped": lambda d: d["orders"]["0"].pop(),
    "task twice": lambda d: d["orders"]["0"].append(d["orders"]["0"][0]),
    "task of another rank": lambda d: d["orders"]["0"].append(d["orders"]["1"][0]),
    "task of no block": lambda d: d["orders"]["0"].append("F9.0.0"),
    "task of no pass": lambda d: d["orders"]["0"].append("X0.0.0"),
    "task as number": lambda d: d["orders"]["0"].append(7),
    "negative task": lambda d: d["orders"]["0"].append("F-1.0.0"),
    "order dropped": lambda d: d["orders"].pop("1"),
    "order of another rank": lambda d: d["orders"].update({"2": []}),
    "before no task": lambda d: d["befores"].append(["F0.0.0", "F0.7.0"]),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_plans_are_refused_with_the_file(what: str, tmp_path: Path) -> None:
    profile, path = chain([layer(number) for number in range(4)]), tmp_path / "plan.json"
    save_plan(named("one_f_one_b", profile, 2, micro_batches=2), path)
    document = json.loads(path.read_text())
    WRONG[what](document)
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError) as error:
        load_plan(path, profile)
    assert str(error.value).startswith(str(path))


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    profile, path = chain([layer(number) for number in range(3)]), tmp_path / "some.json"
    save_plan(named("zero_bubble", profile, 3), path)
    plan = path.read_bytes()
    profile.save(path)
    for whole, read in (
        (plan, lambda: load_plan(path, profile)),
        (path.read_bytes(), lambda: Profile.load(path)),
    ):
        for length in random.Random(1).sample(range(len(whole) - 2), 40):
            path.write_bytes(whole[:length])
            with pytest.raises(ConfigError) as error:
                read()
            assert str(error.value).startswith(str(path))
    for missing in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError, match=str(missing)):
            load_plan(missing, profile)


# -- profiles ------------------------------------------------------------------------------------------------


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    profile, path = everything(), tmp_path / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile


BAD: dict[str, tuple[str, Any]] = {
    "negative time": ("forward", -1e-9),
    "infinite time": ("backward", float("inf")),
    "no time": ("forward", float("nan")),
    "text as time": ("recompute", "1.0"),
    "time of ages": ("backward", 1e300),
    "negative bytes": ("saved", -1),
    "bytes of 80 bits": ("gradients", 1 << 80),
    "half a byte": ("output", 0.5),
    "negative length": ("shape", [4, -1]),
    "no parts": ("axes", {"batch": {"dims": [0], "parts": [], "how": "split"}}),
    "negative parts": ("axes", {"batch": {"dims": [0], "parts": [-2], "how": "split"}}),
    "unknown how": ("axes", {"batch": {"dims": [0], "parts": [2], "how": "torn"}}),
    "negative parameters": ("params", {"w": -4}),
    "name twice": ("name", "b1"),
}


@pytest.mark.parametrize("what", BAD)
def test_wrong_profiles_are_refused_with_the_file(what: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    document = json.loads(chain([layer(number) for number in range(3)]).model_dump_json())
    key, value = BAD[what]
    document["blocks"][0][key] = value
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError) as error:
        Profile.load(path)
    assert str(error.value).startswith(str(path))
    assert key in str(error.value) or what == "name twice"


def test_a_profile_of_gigabytes_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.touch()
    os.truncate(path, 5 << 30)  # a hole
    with pytest.raises(ConfigError, match=str(path)):
        Profile.load(path)
