"""audit_every: now and then, ranks compare what they have received.

Every rank must hold the same bits after a collective. That follows from how results are made; this
checks that nothing on the way has broken it.
"""

from __future__ import annotations

import hashlib

import torch

from mcr_plus.dispatch.work import JointWork, Work
from mcr_plus.errors import ResultMismatch
from mcr_plus.interfaces import Issue, Next
from mcr_plus.message import Message, Signature


def audited(issue: Issue, every: int, codec: str, signature: Signature, next: Next) -> Issue:
    """Have ranks compare digests after every so many calls; a difference is `ResultMismatch` on all."""
    ranks = signature.ranks
    wanted = signature.replace(
        kind="all_gather", dtype=torch.int64, shape=(1,), nbytes=8 * ranks, device="cpu",
        reduce_op=None, root=None, backend=None, parts=None, key=None,
    )  # fmt: skip
    compare = next(wanted)
    calls = 0

    def run(message: Message) -> Work:
        nonlocal calls
        calls += 1
        if calls % every:
            return issue(message)
        outputs, call = message.outputs, calls
        work = issue(message)
        mine, all_of_them = torch.zeros(1, dtype=torch.int64), torch.zeros(ranks, dtype=torch.int64)

        def digest() -> None:
            mine[0] = _digest(outputs)

        def check() -> None:
            digests = all_of_them.tolist()
            if len(set(digests)) > 1:
                usual = max(digests, key=digests.count)
                others = [rank for rank, each in enumerate(digests) if each != usual]
                raise ResultMismatch(
                    f"{signature.describe()}, codec {codec}, call {call}: rank(s) "
                    f"{', '.join(map(str, others))} of group '{signature.group}' hold other results than the "
                    "rest; all should be equal bit for bit"
                )

        audit = Message(wanted, (mine,), (all_of_them,), after=work, prepare=digest)
        told = compare(audit).then(check)
        info = work.info
        return JointWork([work, told], info.kind, nbytes=info.bytes, tag=info.tag, codec=info.codec)

    return run


def _digest(tensors: tuple[torch.Tensor, ...]) -> int:
    """63 bits that are equal for equal bits."""
    hashed = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        hashed.update(flat.view(torch.uint8).numpy().data)
    return int.from_bytes(hashed.digest(), "big") >> 1
