"""`mcr-plus layout`: its output and exit status."""

from __future__ import annotations

import json
from functools import partial

import pytest
from command import mcr_plus

layout = partial(mcr_plus, "layout")


def test_a_transfer_between_hosts_is_printed_next_to_its_bound() -> None:
    status, printed, said = layout("S0 @2", "R @2+2", "--shape", "64,32", "--nodes", 2)
    assert (status, said) == (0, "")
    # Both replicas lack all 8 KiB, which enter their host once.
    assert "host 1: 8 KiB must enter it" in printed
    assert "link of hosts 0 -> 1: 8 KiB" in printed
    assert "link of hosts 1 -> 0" not in printed
    assert "16 KiB must be received by any plan; this one: 16 KiB, 1.00 times that" in printed
    assert "proved right" in printed
    assert "DTensor" not in printed  # it has no plan between meshes


@pytest.mark.parametrize(
    ("source", "target", "bound", "theirs"),
    [
        ("S0 @4", "R @4", 4 * 48 * 4, {"plan_bytes": 4 * 48 * 4, "most_received": 48 * 4}),
        ("R,S0 @2x2", "S1,S1 @2x2", 4 * 8 * 4, {"plan_bytes": 4 * 32 * 4, "most_received": 32 * 4}),
        ("S0 @4", "R @4+2", 2 * 48 * 4 + 2 * 64 * 4, None),
    ],
)
def test_the_document(source: str, target: str, bound: int, theirs: dict[str, int] | None) -> None:
    status, printed, _ = layout(source, target, "--shape", "8,8", "--json")
    document = json.loads(printed)
    assert status == 0
    assert document.keys() >= {"steps", "bytes_per_rank", "bound", "plan_bytes", "right"}
    assert document["right"] is True
    assert document["bound"] == bound
    assert document["plan_bytes"] == sum(document["bytes_per_rank"].values()) >= bound
    assert document["dtensor"] == theirs


@pytest.mark.parametrize(
    ("source", "target", "nodes", "links"),
    [
        ("S0 @4", "R @4", 2, {"0 -> 1": 128, "1 -> 0": 128}),
        ("R @4", "S0 @4", 2, {}),
        ("R @2", "R @2+4", 3, {"0 -> 2": 256}),
    ],
)
def test_bytes_of_links(source: str, target: str, nodes: int, links: dict[str, int]) -> None:
    status, printed, _ = layout(source, target, "--shape", "64", "--nodes", nodes, "--json")
    document = json.loads(printed)
    assert status == 0
    assert document["bytes_per_link"].keys() == links.keys()
    for link, least in links.items():
        assert document["bytes_per_link"][link] >= least


@pytest.mark.parametrize("layout_", ["P @3", "P(max) @2", "P,S0 @2x2"])
def test_from_addends_to_the_same_ones_nothing_moves(layout_: str) -> None:
    status, printed, _ = layout(layout_, layout_, "--shape", "8,8", "--json")
    document = json.loads(printed)
    assert status == 0
    assert (document["plan"], document["plan_bytes"], document["bound"]) == ("direct", 0, 0)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("S0", "R @2", "--shape", "8"), "expected placements and a mesh, such as 'S0,R @2x4'"),
        (("S3 @2", "R @2", "--shape", "8"), "out of range for shape [8]"),
        (("S0 @2", "R @2", "--shape", "8", "--nodes", 5), "nodes: 5 nodes, but only 2 ranks"),
        (("S0 @2", "R @2", "--shape", "8", "--dtype", "float7"), "float7"),
        (("P(avg) @2", "R @2", "--shape", "8", "--dtype", "bool"), "source P(avg) @2 [8]: means of bool"),
    ],
)
def test_wrong_arguments(words: tuple[object, ...], error: str) -> None:
    status, printed, said = layout(*words)
    assert status == 2
    assert printed == ""
    assert error in said
