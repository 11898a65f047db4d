"""Sends and receives without a partner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mcr_plus.observe.dumps import Dump, DumpedGroup, DumpedOperation

Lonely = tuple[int, str, tuple[int, ...], DumpedOperation, str]


def lonely_messages(dumps: Mapping[int, Dump]) -> Iterator[Lonely]:
    """Yield the messages that ranks wait for in vain: rank, group, ranks to blame, message, and reason."""
    for rank, dump in dumps.items():
        for name, group in dump.groups.items():
            for each in group.messages:
                if each.holds_up and (lonely := _lonely(dumps, rank, group, each)) is not None:
                    yield rank, name, *lonely


def _lonely(
    dumps: Mapping[int, Dump], rank: int, group: DumpedGroup, each: DumpedOperation
) -> tuple[tuple[int, ...], DumpedOperation, str] | None:
    """Return why a message cannot complete; None if its partner is in flight too, or is unknown."""
    me = group.ranks.index(rank)
    peers = [each.peer] if each.peer is not None else [peer for peer in range(len(group.ranks)) if peer != me]
    ranks = tuple(group.ranks[peer] for peer in peers)
    theirs = {
        other: [
            message
            for message in dumps[other].groups[group.name].messages
            if (message.kind == "send") != (each.kind == "send") and message.peer in (me, None)
        ]
        for other in ranks
        if other in dumps and dumps[other].written_by == other and group.name in dumps[other].groups
    }
    if len(theirs) < len(ranks):
        return None
    pending = [message for messages in theirs.values() for message in messages if not message.done]
    if any(message.match_tag == each.match_tag for message in pending):
        return None
    verb, to = ("sends", "to") if each.kind == "send" else ("receives", "from")
    opposite = "receive" if each.kind == "send" else "send"
    whom = f"rank {ranks[0]}" if each.peer is not None else "any rank"
    text = f"rank {rank} {verb} {each.text} {to} {whom} with tag {each.match_tag} in group '{group.name}'"
    text += f"; no {opposite} with that tag is in flight there"
    if pending:
        text += f", only with tag {', '.join(sorted({str(message.match_tag) for message in pending}))}"
    elif any(theirs.values()):
        last = max((message for messages in theirs.values() for message in messages), key=lambda m: m.issued)
        text += f"; its last {opposite}, {last.text} with tag {last.match_tag}, is complete"
    else:
        text += f", and there has been no {opposite}"
    return ranks, each, text
