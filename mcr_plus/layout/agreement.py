"""Check that ranks agree on the tensors of a redistribution, and report differences."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from mcr_plus.core.kinds import dtype_name
from mcr_plus.errors import InvalidArgument, short
from mcr_plus.layout.local import prefix

if TYPE_CHECKING:
    from mcr_plus.communicator.communicator import Communicator
    from mcr_plus.layout.plan import Spec

TAG: Final = "redistribute"
_NAMED: Final = 8  # maximum number of ranks named in an error


def agree_on_specs(
    comm: Communicator, specs: Sequence[Spec], options: str, wrong: str | None, among: Sequence[Spec]
) -> int:
    """Return the digest of specs and options.

    `among`: all tensors of the call; a tensor with another dtype on one rank is missing from its `specs`, so
    only `among` identifies the tensor. Raises `InvalidArgument` on all ranks if specs or options differ
    between ranks, or if any rank passes `wrong`.
    """
    words = [
        _number(spec.name.encode()) ^ _number(spec.source.digest) ^ (_number(spec.target.digest) << 1)
        for spec in specs
    ]
    words = [word ^ _number(str(spec.dtype).encode()) for word, spec in zip(words, specs, strict=True)]
    digest = _number(options.encode())
    for word in words:
        digest = (digest * 1_000_003 + word) & ((1 << 62) - 1)
    facts = [digest, -digest, len(specs), -len(specs), int(wrong is not None)]
    most = torch.tensor(facts, device="cpu")
    comm.all_reduce(most, "MAX", compress=False, tag=TAG)
    if most.tolist() == [digest, -digest, len(specs), -len(specs), 0]:
        return digest
    mine: Any = (
        wrong
        if wrong is not None
        else [
            options,
            {spec.name: (str(spec.source), str(spec.target), dtype_name(spec.dtype)) for spec in among},
        ]
    )
    raise _difference(comm, comm.all_gather_object(mine, tag=TAG))


def agree_on_dtypes(comm: Communicator, held: Mapping[str, torch.dtype]) -> None:
    """Raise `InvalidArgument` on all ranks if a tensor has different dtypes on ranks that hold it.

    `held`: the dtypes of this rank's tensors, by name.
    """
    mine = {name: dtype_name(dtype) for name, dtype in held.items()}
    difference = _different_dtypes(comm, comm.all_gather_object(mine, tag=TAG))
    if difference is not None:
        raise difference


def _difference(comm: Communicator, said: Sequence[Any]) -> InvalidArgument:
    errors = {
        rank: text for rank, text in zip(comm.ranks, said, strict=True) if isinstance(text, str) and text
    }
    if errors:
        first = next(iter(errors.values()))
        where = _ranks([r for r, text in errors.items() if text == first])
        return InvalidArgument(f"{first} (on {where}{comm.opened.group.of_job})")
    of_job, one, (options, known) = comm.opened.group.of_job, comm.ranks[0], said[0]
    for rank, (others, specs) in zip(comm.ranks, said, strict=True):
        if others != options:
            return InvalidArgument(
                f"ranks pass different options: rank {one}{of_job} {options}; rank {rank}{of_job} {others}"
            )
        for here, there, has, lacks in ((known, specs, one, rank), (specs, known, rank, one)):
            for name in here:
                if name not in there:
                    return InvalidArgument(
                        f"rank {has}{of_job} passes {_words(name, here[name])}; rank {lacks}{of_job} passes "
                        f"no layouts for {name!r}"
                    )
        for name, mine in known.items():
            if specs[name][:2] != mine[:2]:
                return InvalidArgument(
                    f"ranks pass different layouts: rank {one}{of_job} {_words(name, mine)}; "
                    f"rank {rank}{of_job} {_words(name, specs[name])}"
                )
        if list(specs) != list(known):
            orders = f"rank {one}{of_job} {short(list(known))}; rank {rank}{of_job} {short(list(specs))}"
            return InvalidArgument(f"ranks pass tensors in different orders: {orders}")
    dtypes = [{name: spec[2] for name, spec in specs.items()} for _, specs in said]
    return _different_dtypes(comm, dtypes) or InvalidArgument(
        "ranks pass layouts with equal names but different boxes"
    )


def _different_dtypes(comm: Communicator, said: Sequence[Mapping[str, str]]) -> InvalidArgument | None:
    """Return the error for the first tensor whose dtype differs between ranks. `said`: dtypes by rank."""
    for name in dict.fromkeys(name for each in said for name in each):
        ranks_of: dict[str, list[int]] = {}
        for rank, each in zip(comm.ranks, said, strict=True):
            if name in each:
                ranks_of.setdefault(each[name], []).append(rank)
        if len(ranks_of) > 1:
            of_job = comm.opened.group.of_job
            found = "; ".join(f"{dtype} on {_ranks(ranks)}{of_job}" for dtype, ranks in ranks_of.items())
            return InvalidArgument(f"{prefix(name)}ranks pass tensors of different dtypes: {found}")
    return None


def _ranks(ranks: Sequence[int]) -> str:
    some = ", ".join(map(str, ranks[:_NAMED]))
    return f"rank{'s' * (len(ranks) > 1)} {some}{', …' * (len(ranks) > _NAMED)}"


def _words(name: str, spec: Sequence[str]) -> str:
    source, target, _ = spec
    return f"{prefix(name)}{source} -> {target}"


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")
