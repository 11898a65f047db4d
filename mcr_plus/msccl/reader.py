"""Reader of MSCCL XML, in both of its dialects.

Optional attributes and their defaults:

    outofplace    the opposite of inplace, as before the attribute existed
    minBytes      0
    maxBytes      no limit; also written 0
    root          0 (for broadcast, reduce, gather and scatter; our own attribute)

`reduce_scatter` means `reducescatter`. Comments and unknown attributes are ignored; an unknown element is
refused. Ids may come in any order, but each id from 0 on must occur once. The reader never accesses anything
outside the file: it refuses document types, and so all entities.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar
from xml.parsers import expat

from mcr_plus.config.document import read_bytes
from mcr_plus.errors import ConfigError, short, unknown
from mcr_plus.msccl.algorithm import (
    COLLECTIVES,
    OPERATIONS,
    SPACES,
    Algorithm,
    AlgorithmStep,
    Chunks,
    Operation,
    RankProgram,
    Space,
    ThreadBlock,
)
from mcr_plus.msccl.well_formed import MAX_CHUNKS, Problem, structure_problems

MAX_FILE_BYTES: Final = 16 << 20
MAX_ELEMENTS: Final = 1 << 18
"""Maximum per file. An element takes up to a hundred times as much memory as in the file."""
_CHILD: Final = {"algo": "gpu", "gpu": "tb", "tb": "step"}
_INTEGER: Final = re.compile(r"-?[0-9]{1,19}")
_INT64: Final = 1 << 63
_COLLECTIVES: Final = {name: name for name in COLLECTIVES} | {"reduce_scatter": "reducescatter"}
_PROTOCOLS: Final = {name: name for name in ("Simple", "LL", "LL128")}
_OPERATIONS: Final[Mapping[str, Operation]] = {name: name for name in OPERATIONS}
_SPACES: Final[Mapping[str, Space]] = {name: name for name in SPACES}
_Choice = TypeVar("_Choice")


def read_algorithm(path: str | Path) -> Algorithm:
    """Read an algorithm file of at most 16 MiB and 262144 elements.

    Returns:
        Algorithm with checked peers, offsets and dependencies. `verifier.verify` proves that the algorithm
        computes its collective.

    Raises:
        ConfigError: the file cannot be read, is no MSCCL XML, or is inconsistent; begins with
            `file:line: place:`.
    """
    content = read_bytes(Path(path), str(path), most=MAX_FILE_BYTES)
    return parse_algorithm(content, str(path))


def parse_algorithm(text: bytes | str, name: str) -> Algorithm:
    """Read an algorithm from the text of a file, like `read_algorithm`; errors call the file `name`."""
    root = _parse(text.encode() if isinstance(text, str) else text, name)
    algorithm = _algorithm(root, name)
    for problem in structure_problems(algorithm):
        line = problem.line or root.line
        raise ConfigError(Problem(line, problem.place, problem.what).text(algorithm))
    return algorithm


# --- XML to elements ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Element:
    """An element, and its place as errors state it: `algo`, `gpu[0].tb[1]`."""

    file: str
    tag: str
    line: int
    place: str
    attributes: Mapping[str, str]
    children: list[_Element] = field(default_factory=list)

    def error(self, name: str, what: str) -> ConfigError:
        """Return an error about one attribute."""
        return ConfigError(f"{self.file}:{self.line}: {self.place}.{name}: {what}")

    def text(self, name: str, default: str | None = None) -> str:
        """Return the text of an attribute."""
        value = self.attributes.get(name, default)
        if value is None:
            raise self.error(name, "missing; every " + self.tag + " has one")
        return value

    def integer(self, name: str, default: int | None = None, *, least: int | None = None) -> int:
        """Return an integer attribute, which must be at least `least`."""
        text = self.text(name, None if default is None else str(default))
        if not _INTEGER.fullmatch(text):
            raise self.error(name, f"{short(text)}, expected an integer")
        value = int(text)
        if not -_INT64 <= value < _INT64:
            raise self.error(name, f"{text}, expected an integer of 64 bits")
        if least is not None and value < least:
            raise self.error(name, f"{value}, expected at least {least}")
        return value

    def chunks(self, name: str) -> int:
        """Return an attribute that is a buffer length in chunks."""
        value = self.integer(name, least=0)
        if value > MAX_CHUNKS:
            raise self.error(name, f"{value}, expected at most {MAX_CHUNKS}")
        return value

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Return an attribute that is 0 or 1."""
        text = self.text(name, None if default is None else str(int(default)))
        if text not in ("0", "1"):
            raise self.error(name, f"{short(text)}, expected 0 or 1")
        return text == "1"

    def choice(self, name: str, what: str, known: Mapping[str, _Choice]) -> _Choice:
        """Return the value of an attribute that is one of the `known` names."""
        text = self.text(name)
        if text not in known:
            raise self.error(name, unknown(what, text, tuple(known)))
        return known[text]

    def numbered(self, name: str) -> list[_Element]:
        """Return the children in the order of their ids, which must be 0, 1, 2 and so on, each once."""
        children: dict[int, _Element] = {}
        for child in self.children:
            number = child.integer(name, least=0)
            first = children.setdefault(number, child)
            if first is not child:
                what = f"{number} a second time, first at line {first.line}; expected every id once"
                raise child.error(name, what)
        for number in range(len(children)):
            if number not in children:
                child = children[min(other for other in children if other > number)]
                raise child.error(name, f"{child.text(name)}, but there is no {number}; expected no gap")
        for number, child in children.items():
            child.place = f"{'' if self.tag == 'algo' else self.place + '.'}{child.tag}[{number}]"
        return [children[number] for number in range(len(children))]


def _parse(content: bytes, file: str) -> _Element:
    """Return the root element; refuse elements other than nested `algo`, `gpu`, `tb` and `step`."""
    parser = expat.ParserCreate()
    roots: list[_Element] = []
    opened: list[_Element] = []
    count = 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal count
        line = parser.CurrentLineNumber
        count += 1
        if not opened:
            _check_root(tag, f"{file}:{line}")
            roots.append(_Element(file, tag, line, tag, attributes))
            opened.append(roots[0])
            return
        parent = opened[-1]
        here = f"{file}:{line}: {parent.place}"
        if tag != _CHILD.get(parent.tag):
            expected = _CHILD.get(parent.tag)
            raise ConfigError(f"{here}: element {short(tag)}, expected {expected or 'nothing in a step'}")
        if count > MAX_ELEMENTS:
            raise ConfigError(f"{here}: {tag} is element {count}, expected at most {MAX_ELEMENTS} of a file")
        # position of the element until the id has been read
        prefix = "" if parent.tag == "algo" else f"{parent.place}."
        child = _Element(file, tag, line, f"{prefix}{tag}[{len(parent.children)}]", attributes)
        parent.children.append(child)
        opened.append(child)

    def refuse_doctype(*_: object) -> None:
        line = parser.CurrentLineNumber
        raise ConfigError(f"{file}:{line}: document: a document type is refused, expected <algo …> at once")

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: opened.pop()
    parser.StartDoctypeDeclHandler = refuse_doctype
    try:
        parser.Parse(content, True)
    except expat.ExpatError as error:
        what = expat.ErrorString(error.code)
        raise ConfigError(f"{file}:{error.lineno}: document: not whole, valid XML: {what}") from None
    except (LookupError, ValueError) as error:  # of the encoding that the file declares
        raise ConfigError(f"{file}:1: document: cannot be decoded: {error}; expected UTF-8") from None
    return roots[0]


def _check_root(tag: str, place: str) -> None:
    if tag == "sccl_algos":
        what = "this is a selector of the first MSCCL, a list of files; expected one of the files in it"
        raise ConfigError(f"{place}: {tag}: {what}")
    if tag != "algo":
        raise ConfigError(f"{place}: document: root element {short(tag)}, expected 'algo'")


# --- Elements to an algorithm -------------------------------------------------------------------------------


def _algorithm(root: _Element, file: str) -> Algorithm:
    in_place = root.flag("inplace")
    most = root.integer("maxBytes", 0, least=0)
    return Algorithm(
        name=root.text("name"),
        collective=root.choice("coll", "collective", _COLLECTIVES),
        ranks=root.integer("ngpus", least=1),
        chunks=root.integer("nchunksperloop", least=1),
        channels=root.integer("nchannels", least=1),
        programs=tuple(_program(gpu) for gpu in root.numbered("id")),
        in_place=in_place,
        out_of_place=root.flag("outofplace", not in_place),
        least=root.integer("minBytes", 0, least=0),
        most=most or None,
        root=root.integer("root", 0, least=0),
        protocol=root.choice("proto", "protocol", _PROTOCOLS),
        file=file,
    )


def _program(gpu: _Element) -> RankProgram:
    return RankProgram(
        inputs=gpu.chunks("i_chunks"),
        outputs=gpu.chunks("o_chunks"),
        scratch=gpu.chunks("s_chunks"),
        blocks=tuple(_block(tb) for tb in gpu.numbered("id")),
        line=gpu.line,
    )


def _block(tb: _Element) -> ThreadBlock:
    send, receive = tb.integer("send", least=-1), tb.integer("recv", least=-1)
    alone = send == receive == -1
    channel = tb.integer("chan", least=-1 if alone else 0)
    steps = tuple(_step(step) for step in tb.numbered("s"))
    return ThreadBlock(send, receive, max(channel, 0), steps, tb.line)


def _step(step: _Element) -> AlgorithmStep:
    return AlgorithmStep(
        operation=step.choice("type", "step type", _OPERATIONS),
        source=Chunks(step.choice("srcbuf", "buffer", _SPACES), step.integer("srcoff")),
        target=Chunks(step.choice("dstbuf", "buffer", _SPACES), step.integer("dstoff")),
        count=step.integer("cnt"),
        after=_after(step),
        awaited=step.flag("hasdep"),
        line=step.line,
    )


def _after(step: _Element) -> tuple[int, int] | None:
    block, index = step.integer("depid", least=-1), step.integer("deps", least=-1)
    if block == -1 and index == -1:
        return None
    if block == -1 or index == -1:
        missing = "depid" if block == -1 else "deps"
        raise step.error(missing, "-1, but the other of depid and deps is not; expected both or none")
    return block, index
