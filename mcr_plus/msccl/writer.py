"""Write algorithms as MSCCL XML, with every attribute that a known reader requires."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import quoteattr

from mcr_plus.errors import ConfigError
from mcr_plus.msccl.algorithm import Algorithm, AlgorithmStep
from mcr_plus.msccl.postconditions import ROOTED


def algorithm_text(algorithm: Algorithm) -> str:
    """Return the text of a file; reading it gives an equal algorithm, except for file and lines."""
    return "\n".join(_lines(algorithm)) + "\n"


def write_algorithm(algorithm: Algorithm, path: str | Path) -> None:
    """Write an algorithm file; raises `ConfigError` if it cannot be written."""
    try:
        Path(path).write_text(algorithm_text(algorithm), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot write: {error.strerror}") from None


def _lines(algorithm: Algorithm) -> Iterator[str]:
    root = {"root": algorithm.root} if algorithm.collective in ROOTED else {}
    yield _tag(
        "algo",
        name=algorithm.name,
        proto=algorithm.protocol,
        nchannels=algorithm.channels,
        nchunksperloop=algorithm.chunks,
        ngpus=algorithm.ranks,
        coll=algorithm.collective,
        inplace=int(algorithm.in_place),
        outofplace=int(algorithm.out_of_place),
        minBytes=algorithm.least,
        maxBytes=algorithm.most or 0,
        **root,
    )
    for rank, program in enumerate(algorithm.programs):
        sizes = {"i_chunks": program.inputs, "o_chunks": program.outputs, "s_chunks": program.scratch}
        yield "  " + _tag("gpu", id=rank, **sizes)
        for number, block in enumerate(program.blocks):
            yield "    " + _tag("tb", id=number, send=block.send, recv=block.receive, chan=block.channel)
            for index, step in enumerate(block.steps):
                yield "      " + _step(index, step)
            yield "    </tb>"
        yield "  </gpu>"
    yield "</algo>"


def _step(index: int, step: AlgorithmStep) -> str:
    block, deps = step.after or (-1, -1)
    return _tag(
        "step",
        "/>",
        s=index,
        type=step.operation,
        srcbuf=step.source.space,
        srcoff=step.source.at,
        dstbuf=step.target.space,
        dstoff=step.target.at,
        cnt=step.count,
        depid=block,
        deps=deps,
        hasdep=int(step.awaited),
    )


def _tag(name: str, end: str = ">", /, **attributes: str | int) -> str:
    return f"<{name} {' '.join(f'{key}={quoteattr(str(value))}' for key, value in attributes.items())}{end}"
