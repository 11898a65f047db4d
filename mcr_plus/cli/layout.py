"""`mcr-plus layout`: plan the redistribution of a tensor between two layouts, without a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcr_plus.cli.output import print_json, print_result, print_table

if TYPE_CHECKING:
    from mcr_plus.layout.survey import ProgramOutcome, ProgramSurvey


def layout(
    source: Annotated[str, typer.Argument(help="Placements and mesh, such as 'S0,R @2x4' (ranks 0 to 7).")],
    target: Annotated[str, typer.Argument(help="Likewise; 'R,S1 @4x2+8' for a mesh of ranks 8 to 15.")],
    shape: Annotated[str, typer.Option(metavar="N,N,…", help="Shape of the global tensor.")],
    dtype: Annotated[str, typer.Option(help="Type of the elements.")] = "float32",
    nodes: Annotated[int, typer.Option(min=1, help="Number of hosts, filled with ranks in order.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the plan from layout SOURCE to TARGET: steps, bytes, and the lower bound of any plan."""
    import torch

    from mcr_plus.cli.explain import check_known, parse_shape
    from mcr_plus.config.names import DTYPE_NAMES
    from mcr_plus.errors import InvalidArgument
    from mcr_plus.layout.plan import no_reduction
    from mcr_plus.layout.survey import node_of_rank, parse_layout, survey

    check_known("dtype", dtype, DTYPE_NAMES, "--dtype")
    extents = parse_shape(shape)
    try:
        before, after = parse_layout(source, extents), parse_layout(target, extents)
        where = node_of_rank({*before.ranks, *after.ranks}, nodes)
        kind = getattr(torch, dtype)
        if before != after and (what := no_reduction(before, kind)) is not None:
            raise InvalidArgument(f"source {before}: {what}")
        found = survey(before, after, kind.itemsize, where, kind)
    except InvalidArgument as error:
        raise typer.BadParameter(str(error)) from None
    document = _document(found, dtype, nodes) | {"dtensor": _dtensor(source, target, extents, found.itemsize)}
    if as_json:
        print_json(document)
    else:
        _print(found, document)
    if not document["right"]:
        raise typer.Exit(1)


def _document(found: ProgramSurvey, dtype: str, nodes: int) -> dict[str, Any]:
    import numpy as np

    plan, item = found.plan, found.itemsize
    return {
        "source": str(found.source),
        "target": str(found.target),
        "dtype": dtype,
        "ranks": len(found.ranks),
        "nodes": nodes,
        "plan": plan.program.name,
        "steps": _steps(plan),
        "bytes_per_rank": dict(zip(map(str, found.ranks), plan.received.tolist(), strict=True)),
        "sent_per_rank": dict(zip(map(str, found.ranks), plan.sent.tolist(), strict=True)),
        "bound": found.bound.total * item,
        "plan_bytes": int(plan.received.sum()),
        "bound_per_rank": {str(rank): number * item for rank, number in found.bound.received.items()},
        "bound_per_node": {str(node): number * item for node, number in found.bound.entering.items()},
        "bytes_per_link": {
            f"{sender} -> {receiver}": int(plan.links[sender, receiver])
            for sender, receiver in np.argwhere(plan.links).tolist()
        },
        "expected_us": round(plan.seconds * 1e6, 1),
        "others": {
            outcome.program.name: {
                "plan_bytes": int(outcome.received.sum()),
                "expected_us": round(outcome.seconds * 1e6, 1),
            }
            for outcome in found.outcomes
            if outcome is not plan
        },
        "right": plan.wrong is None,
        "wrong": plan.wrong,
    }


def _dtensor(source: str, target: str, shape: list[int], itemsize: int) -> dict[str, int] | None:
    """Return the bytes of DTensor's own plan; None between meshes, or if DTensor has no plan."""
    from mcr_plus.layout.survey import parse_mesh

    (before, ranks), (after, others) = parse_mesh(source), parse_mesh(target)
    if ranks.shape != others.shape or (ranks != others).any():
        return None
    from mcr_plus.dtensor import dtensor_volume  # DTensor takes a second to import

    volume = dtensor_volume(shape, ranks.shape, before, after)
    if volume is None:
        return None
    return {"plan_bytes": volume.total * itemsize, "most_received": volume.most * itemsize}


def _steps(plan: ProgramOutcome) -> list[dict[str, Any]]:
    """Return the steps of a plan: layout after the step, and maximum loads over ranks."""
    names = [step.target.name for step in plan.program.steps] or [plan.program.name]
    most = plan.loads.max(axis=0)
    return [
        {
            "to": name,
            "sent": int(row[0] + row[3]),
            "received": int(row[1] + row[4]),
            "received_from_other_nodes": int(row[4]),
            "partners": int(row[2] + row[5]),
        }
        for name, row in zip(names, most, strict=True)
    ]


def _print(found: ProgramSurvey, document: dict[str, Any]) -> None:
    from mcr_plus.core.units import about

    print(f"{document['source']} -> {document['target']}, {document['dtype']}: {document['plan']}\n")
    rows = [
        (
            step["to"],
            about(step["sent"]),
            about(step["received"]),
            about(step["received_from_other_nodes"]),
            str(step["partners"]),
        )
        for step in document["steps"]
    ]
    columns = ("step to", "sent", "received", "from other hosts", "partners")
    print_table("Maximum over ranks in each step", columns, rows)
    bound = found.bound
    ranks = [
        (
            str(rank),
            about(int(sent)),
            about(int(received)),
            about(bound.received.get(rank, 0) * found.itemsize),
        )
        for rank, sent, received in zip(found.ranks, found.plan.sent, found.plan.received, strict=True)
    ]
    print_table("Ranks", ("rank", "sent", "received", "lacks"), ranks)
    for node, number in sorted(bound.entering.items()):
        print(f"host {node}: {about(number * found.itemsize)} must enter it")
    for link, size in document["bytes_per_link"].items():
        print(f"link of hosts {link}: {about(size)}")
    total, least = document["plan_bytes"], document["bound"]
    ratio = f", {total / least:.2f} times that" if least else ""
    print(f"all ranks together: {about(least)} must be received by any plan; this one: {about(total)}{ratio}")
    if (dtensor := document["dtensor"]) is not None:
        most = about(dtensor["most_received"])
        print(f"DTensor's own plan: {about(dtensor['plan_bytes'])}, at most {most} by a rank")
    for name, other in document["others"].items():
        print(f"not chosen: {name} ({about(other['plan_bytes'])}, expected {other['expected_us']:,.0f} µs)")
    if document["right"]:
        print_result(f"=> proved right, expected {document['expected_us']:,.0f} µs (assumed costs)")
    else:
        print(f"=> WRONG: {document['wrong']}")
