"""`audit_every`: every n calls, the ranks compare digests of their results.

All ranks must have the same bits after a collective. The schemes guarantee this; the audit checks it.
"""

from __future__ import annotations

import hashlib

import torch

from mcr_plus.core.group import Group
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.work import JointWork, Work
from mcr_plus.errors import ResultMismatch
from mcr_plus.pipeline.stage import Issue, Next


def audited(issue: Issue, every: int, codec: str, signature: Signature, group: Group, next: Next) -> Issue:
    """Compare digests of the ranks' results after every `every` calls of `issue`.

    If digests differ, the call's `wait` raises `ResultMismatch` on all ranks.
    """
    ranks = signature.ranks
    digests = signature.replace(
        kind="all_gather", dtype=torch.int64, shape=(1,), nbytes=8 * ranks, device="cpu",
        reduce_op=None, root=None, backend=None, parts=None, key=None,
    )  # fmt: skip
    compare = next(digests)
    calls = 0

    def start(message: Message) -> Work:
        nonlocal calls
        calls += 1
        if calls % every:
            return issue(message)
        outputs, call = message.outputs, calls
        work = issue(message)
        mine, all_of_them = (
            torch.zeros(1, dtype=torch.int64, device="cpu"),
            torch.zeros(ranks, dtype=torch.int64, device="cpu"),
        )

        def digest() -> None:
            mine[0] = _digest(outputs)

        def check() -> None:
            digests = all_of_them.tolist()
            if len(set(digests)) > 1:
                usual = max(digests, key=digests.count)
                others = [rank for rank, each in enumerate(digests) if each != usual]
                raise ResultMismatch(
                    f"{signature.describe()}, codec {codec}, call {call}: {group.named(*others)} of "
                    f"group '{group.name}' and its other ranks hold different results; all should be equal "
                    "bit for bit"
                )

        audit = Message(digests, (mine,), (all_of_them,), after=work, prepare=digest)
        audited_work = compare(audit).then(check)
        info = work.info
        return JointWork([work, audited_work], info.kind, nbytes=info.bytes, tag=info.tag, codec=info.codec)

    return Issue(start)


def _digest(tensors: tuple[torch.Tensor, ...]) -> int:
    """Return a 63-bit digest of the tensors' bits."""
    hashed = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        hashed.update(flat.view(torch.uint8).numpy().data)
    return int.from_bytes(hashed.digest(), "big") >> 1
