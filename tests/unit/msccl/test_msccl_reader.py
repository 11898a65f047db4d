"""MSCCL XML: both dialects read, round trips, and an error with its place for everything else."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from mcr_plus.errors import ConfigError
from mcr_plus.msccl import reader
from mcr_plus.msccl.algorithm import COLLECTIVES, OPERATIONS, Algorithm, AlgorithmStep, Chunks
from mcr_plus.msccl.generators import GENERATORS
from mcr_plus.msccl.reader import parse_algorithm, read_algorithm
from mcr_plus.msccl.writer import algorithm_text, write_algorithm

# An exchange of two ranks that sums over scratch, with a nop and dependencies; line 1 is <algo>.
FREE = 'depid="-1" deps="-1"'
FIRST = 'depid="0" deps="0"'
PAIR = f"""\
<algo name="pair" proto="Simple" nchannels="1" nchunksperloop="2" ngpus="2" coll="allreduce" inplace="1" \
outofplace="0" minBytes="8" maxBytes="4096">
  <gpu id="0" i_chunks="2" o_chunks="0" s_chunks="2">
    <tb id="0" send="1" recv="-1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="2" {FREE} hasdep="1"/>
    </tb>
    <tb id="1" send="-1" recv="1" chan="0">
      <step s="0" type="r" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="2" {FREE} hasdep="0"/>
      <step s="1" type="nop" srcbuf="i" srcoff="-1" dstbuf="o" dstoff="-1" cnt="0" {FIRST} hasdep="0"/>
      <step s="2" type="re" srcbuf="s" srcoff="0" dstbuf="i" dstoff="0" cnt="2" {FREE} hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="2" o_chunks="0" s_chunks="2">
    <tb id="0" send="0" recv="-1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="2" {FREE} hasdep="1"/>
    </tb>
    <tb id="1" send="-1" recv="0" chan="0">
      <step s="0" type="r" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="2" {FREE} hasdep="0"/>
      <step s="1" type="nop" srcbuf="i" srcoff="-1" dstbuf="o" dstoff="-1" cnt="0" {FIRST} hasdep="0"/>
      <step s="2" type="re" srcbuf="s" srcoff="0" dstbuf="i" dstoff="0" cnt="2" {FREE} hasdep="0"/>
    </tb>
  </gpu>
</algo>
"""


def parse(text: str | bytes) -> Algorithm:
    return parse_algorithm(text, "it.xml")


def changed(old: str, new: str, line: int = 0) -> str:
    """PAIR with its first `old` (of that line, from 1 on) changed."""
    lines = PAIR.splitlines(keepends=True)
    index = line - 1 if line else next(i for i, each in enumerate(lines) if old in each)
    assert old in lines[index]
    return "".join([*lines[:index], lines[index].replace(old, new, 1), *lines[index + 1 :]])


def test_reads_every_field() -> None:
    algorithm = parse(PAIR)
    assert (algorithm.name, algorithm.collective, algorithm.protocol) == ("pair", "allreduce", "Simple")
    assert (algorithm.ranks, algorithm.chunks, algorithm.channels) == (2, 2, 1)
    assert (algorithm.in_place, algorithm.out_of_place) == (True, False)
    assert (algorithm.least, algorithm.most, algorithm.file) == (8, 4096, "it.xml")
    program = algorithm.programs[1]
    assert (program.inputs, program.outputs, program.scratch, program.line) == (2, 0, 2, 12)
    assert [(block.send, block.receive, block.channel) for block in program.blocks] == [
        (0, -1, 0),
        (-1, 0, 0),
    ]
    assert program.blocks[1].steps == (
        AlgorithmStep("r", Chunks("i", 0), Chunks("s", 0), 2, None, False, 17),
        AlgorithmStep("nop", Chunks("i", -1), Chunks("o", -1), 0, (0, 0), False, 18),
        AlgorithmStep("re", Chunks("s", 0), Chunks("i", 0), 2, None, False, 19),
    )
    assert program.blocks[0].steps[0].awaited


@pytest.mark.parametrize(("inplace", "outofplace"), [("1", False), ("0", True)])
def test_optional_attributes_have_defaults(inplace: str, outofplace: bool) -> None:
    text = changed(' outofplace="0" minBytes="8" maxBytes="4096"', "")
    algorithm = parse(
        text.replace('inplace="1"', f'inplace="{inplace}"').replace('o_chunks="0"', 'o_chunks="2"')
    )
    assert algorithm.out_of_place is outofplace
    assert (algorithm.least, algorithm.most, algorithm.root) == (0, None, 0)


def test_no_limit_may_be_written_as_zero() -> None:
    assert parse(changed('maxBytes="4096"', 'maxBytes="0"')).most is None
    for most in (2**60, 2**63 - 1):
        assert parse(changed('maxBytes="4096"', f'maxBytes="{most}"')).most == most


def test_the_other_spelling_of_reducescatter() -> None:
    assert parse(changed('"allreduce"', '"reduce_scatter"')).collective == "reducescatter"


def test_comments_unknown_attributes_and_a_declaration_are_ignored() -> None:
    head = '<?xml version="1.0"?>\n<!-- whose it is -->\n<!-- and more -->\n'
    algorithm = parse(head + changed('nchannels="1"', 'nchannels="1" redop="sum" nthreadblocks="4"'))
    assert algorithm.programs[0].line == 5


def test_gpus_may_be_listed_in_any_order() -> None:
    text = PAIR.replace('gpu id="0"', 'gpu id="x"').replace('gpu id="1"', 'gpu id="0"')
    with pytest.raises(ConfigError, match=r"^it.xml:2: gpu\[0\].id: 'x', expected an integer$"):
        parse(text)
    lines = PAIR.splitlines(keepends=True)
    swapped = "".join([lines[0], *lines[11:21], *lines[1:11], lines[21]])
    original, other = parse(PAIR), parse(swapped)
    assert [program.line for program in other.programs] == [12, 2]
    assert algorithm_text(other) == algorithm_text(original)


ROUND_TRIPS = [(name, ranks) for name in GENERATORS for ranks in (2, 5)]


@pytest.mark.parametrize(("name", "ranks"), ROUND_TRIPS)
def test_written_files_are_read_back(name: str, ranks: int, tmp_path: Path) -> None:
    made = replace(GENERATORS[name].make(ranks), name="<\"&'é>", least=7, most=70, protocol="LL128")
    write_algorithm(made, tmp_path / "it.xml")
    found = read_algorithm(tmp_path / "it.xml")
    without_lines = [
        replace(
            program,
            line=0,
            blocks=tuple(
                replace(block, line=0, steps=tuple(replace(step, line=0) for step in block.steps))
                for block in program.blocks
            ),
        )
        for program in found.programs
    ]
    assert replace(found, file="", programs=tuple(without_lines)) == made


# --- Refused ---------------------------------------------------------------------------------------------

TYPES, KINDS, HUGE = ", ".join(OPERATIONS), ", ".join(COLLECTIVES), "9" * 30
WRONG = {
    "integer": (4, 'cnt="2"', 'cnt="two"', "gpu[0].tb[0].step[0].cnt", "'two', expected an integer"),
    "underscore": (4, 'cnt="2"', 'cnt="1_0"', "gpu[0].tb[0].step[0].cnt", "'1_0', expected an integer"),
    "empty": (4, 'cnt="2"', 'cnt=""', "gpu[0].tb[0].step[0].cnt", "'', expected an integer"),
    "65 bits": (1, 'maxBytes="4096"', f'maxBytes="{2**63}"', "algo.maxBytes",
        f"{2**63}, expected an integer of 64 bits"),
    "huge": (4, 'cnt="2"', f'cnt="{HUGE}"', "gpu[0].tb[0].step[0].cnt", f"'{HUGE}', expected an integer"),
    "missing": (4, ' cnt="2"', "", "gpu[0].tb[0].step[0].cnt", "missing; every step has one"),
    "type": (4, 'type="s"', 'type="q"', "gpu[0].tb[0].step[0].type",
        f"unknown step type 'q'; known: {TYPES}"),
    "buffer": (4, 'srcbuf="i"', 'srcbuf="x"', "gpu[0].tb[0].step[0].srcbuf",
        "unknown buffer 'x'; known: i, o, s"),
    "flag": (4, 'hasdep="1"', 'hasdep="2"', "gpu[0].tb[0].step[0].hasdep", "'2', expected 0 or 1"),
    "offset": (4, 'srcoff="0"', 'srcoff="-1"', "gpu[0].tb[0].step[0].srcoff", "-1, expected 0 or more"),
    "beyond": (4, 'srcoff="0"', 'srcoff="1"', "gpu[0].tb[0].step[0].srcoff",
        "1, expected 0 to 0: the length of buffer 'i' is 2"),
    "too many": (4, 'cnt="2"', 'cnt="3"', "gpu[0].tb[0].step[0].cnt", "3, but the length of buffer 'i' is 2"),
    "none": (4, 'cnt="2"', 'cnt="0"', "gpu[0].tb[0].step[0].cnt", "0, expected at least 1"),
    "less than a nop": (8, 'cnt="0"', 'cnt="-1"', "gpu[0].tb[1].step[1].cnt", "-1, expected at least 0"),
    "sends to nobody": (7, 'type="r"', 'type="rcs"', "gpu[0].tb[1].step[0].type",
        "'rcs' sends, but its thread block's send is -1"),
    "receives from nobody": (4, 'type="s"', 'type="rrs"', "gpu[0].tb[0].step[0].type",
        "'rrs' receives, but its thread block's recv is -1"),
    "duplicate step": (8, 's="1"', 's="0"', "gpu[0].tb[1].step[1].s",
        "0 a second time, first at line 7; expected every id once"),
    "gap": (9, 's="2"', 's="3"', "gpu[0].tb[1].step[2].s", "3, but there is no 2; expected no gap"),
    "duplicate tb": (6, 'id="1"', 'id="0"', "gpu[0].tb[1].id",
        "0 a second time, first at line 3; expected every id once"),
    "duplicate gpu": (12, 'id="1"', 'id="0"', "gpu[1].id",
        "0 a second time, first at line 2; expected every id once"),
    "negative id": (12, 'id="1"', 'id="-1"', "gpu[1].id", "-1, expected at least 0"),
    "peer": (3, 'send="1"', 'send="2"', "gpu[0].tb[0].send", "2, expected a rank: 0 to 1, or -1 for none"),
    "negative peer": (3, 'send="1"', 'send="-2"', "gpu[0].tb[0].send", "-2, expected at least -1"),
    "self": (3, 'send="1"', 'send="0"', "gpu[0].tb[0].send", "0, expected another rank than its own"),
    "channel": (3, 'chan="0"', 'chan="1"', "gpu[0].tb[0].chan", "1, expected 0 to 0: nchannels is 1"),
    "queue": (6, 'send="-1"', 'send="1"', "gpu[0].tb[1].send",
        "1 on channel 0, expected another channel or peer: thread block 0 has this end of the queue"),
    "depid": (8, 'depid="0"', 'depid="2"', "gpu[0].tb[1].step[1].depid",
        "2, expected a thread block: 0 to 1"),
    "deps": (8, 'deps="0"', 'deps="1"', "gpu[0].tb[1].step[1].deps",
        "1, expected a step of thread block 0: 0 to 0"),
    "half a dependency": (8, 'deps="0"', 'deps="-1"', "gpu[0].tb[1].step[1].deps",
        "-1, but the other of depid and deps is not; expected both or none"),
    "collective": (1, '"allreduce"', '"allreduc"', "algo.coll",
        f"unknown collective 'allreduc'; known: {KINDS}, reduce_scatter; did you mean 'allreduce'?"),
    "protocol": (1, '"Simple"', '"simple"', "algo.proto",
        "unknown protocol 'simple'; known: Simple, LL, LL128; did you mean 'Simple'?"),
    "ranks": (1, 'ngpus="2"', 'ngpus="3"', "algo.ngpus",
        "3, expected the number of gpu elements, which is 2"),
    "no place": (1, 'inplace="1"', 'inplace="0"', "algo.inplace",
        "0, expected 1 here or in outofplace: else no call could use it"),
    "limits": (1, 'minBytes="8"', 'minBytes="5000"', "algo.maxBytes",
        "4096, expected at least minBytes (5000), or 0 for no limit"),
    "channels": (1, 'nchannels="1"', 'nchannels="257"', "algo.nchannels", "257, expected 1 to 256"),
    "chunks": (1, 'nchunksperloop="2"', 'nchunksperloop="4097"', "algo.nchunksperloop",
        "4097, expected 1 to 4096"),
    "memory": (2, 's_chunks="2"', 's_chunks="99999999"', "gpu[0].s_chunks",
        "99999999, expected at most 4096"),
    "element": (4, "<step", "<stop", "gpu[0].tb[0]", "element 'stop', expected step"),
    "root": (1, "<algo", "<algorithm", "document", "root element 'algorithm', expected 'algo'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_errors_of_a_file_name_their_place(case: str) -> None:
    line, old, new, place, what = WRONG[case]
    with pytest.raises(ConfigError) as error:
        parse(changed(old, new, line))
    assert str(error.value) == f"it.xml:{line}: {place}: {what}"


def test_a_dependency_needs_hasdep() -> None:
    with pytest.raises(ConfigError) as error:
        parse(changed('hasdep="1"', 'hasdep="0"', 4))
    what = "0, but step 0 of thread block 0 has hasdep=0, expected 1"
    assert str(error.value) == f"it.xml:8: gpu[0].tb[1].step[1].deps: {what}"


def test_chunks_must_be_divided_by_the_ranks() -> None:
    text = changed('"allreduce"', '"alltoall"').replace('nchunksperloop="2"', 'nchunksperloop="3"')
    with pytest.raises(ConfigError, match=r"^it.xml:1: algo.nchunksperloop: 3, expected a multiple of ngpus"):
        parse(text)


def test_a_root_must_be_a_rank() -> None:
    with pytest.raises(ConfigError, match=r"^it.xml:1: algo.root: 2, expected a rank: 0 to 1$"):
        parse(changed('coll="allreduce"', 'coll="reduce" root="2"'))


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(part: float) -> None:
    with pytest.raises(ConfigError, match=r"^it.xml:\d+: document: not whole, valid XML: "):
        parse(PAIR[: int(len(PAIR.rstrip()) * part)])


@pytest.mark.parametrize("encoding", ["nope", "utf-7"])
def test_an_encoding_that_cannot_be_read_is_refused(encoding: str) -> None:
    with pytest.raises(ConfigError, match=r"^it.xml:1: document: cannot be decoded: .*; expected UTF-8$"):
        parse(f'<?xml version="1.0" encoding="{encoding}"?>{PAIR}')


def test_a_selector_of_the_first_msccl_is_refused_by_name() -> None:
    text = '<sccl_algos>\n<load path="it.xml" minsize="1" maxsize="2" proto="LL"/></sccl_algos>'
    with pytest.raises(ConfigError, match=r"^it.xml:1: sccl_algos: this is a selector of the first MSCCL"):
        parse(text)


ENTITY = '<!DOCTYPE algo [<!ENTITY one "1">]>\n'
OUTSIDE = '<!DOCTYPE algo SYSTEM "algo.dtd">\n'


@pytest.mark.parametrize("head", [ENTITY, OUTSIDE, "<!DOCTYPE algo>\n"])
def test_a_document_type_is_refused(head: str) -> None:
    with pytest.raises(ConfigError, match=r"^it.xml:1: document: a document type is refused"):
        parse(head + PAIR)


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"\xff\xfe\xfd", b"version: 1\n", PAIR.encode() + b"<"])
def test_invalid_xml_is_refused(content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"^it.xml:\d+: document: not whole, valid XML: "):
        parse(content)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.xml: cannot read: No such file or directory$"):
        read_algorithm(tmp_path / "none.xml")
    with pytest.raises(ConfigError, match="cannot write: "):
        write_algorithm(parse(PAIR), tmp_path)


def test_a_file_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_FILE_BYTES", 1 << 20)
    path = tmp_path / "large.xml"
    path.write_bytes(b" " * (1 << 20) + b" ")
    with pytest.raises(ConfigError, match=r"large.xml: the file is larger than 1 MiB$"):
        read_algorithm(path)


def test_a_file_with_too_many_elements_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_ELEMENTS", 1000)
    assert parse(PAIR)
    with pytest.raises(ConfigError) as error:
        parse("<algo>\n" + "<gpu/>\n" * 100_000)  # and no further: an open element is not seen
    assert str(error.value) == "it.xml:1001: algo: gpu is element 1001, expected at most 1000 of a file"


@settings(max_examples=examples(300))
@given(st.data())
def test_any_text_is_read_or_refused(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(PAIR)))
    to = data.draw(st.integers(at, min(at + 40, len(PAIR))))
    put = data.draw(st.sampled_from(["", '"', "<", ">", "-1", "999", "x", "i", "<tb/>", "&a;", "\0", "rrcs"]))
    with suppress(ConfigError):
        parse(PAIR[:at] + put + PAIR[to:])
