"""Configuration: valid values, refusals and the places that they name, and the launch environment."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from mcr_plus import registry
from mcr_plus.compression.options import CompressOptions
from mcr_plus.config.names import kind_matches
from mcr_plus.config.options import stage_options
from mcr_plus.config.reader import dump, fingerprint, load, loads
from mcr_plus.config.schema import Config
from mcr_plus.core.environment import (
    LaunchEnvironment,
    launch_environment,
    min_ranks,
    on_one_host,
    ranks_keep_their_own,
    restarts,
    socket_interface,
    torch_environment,
)
from mcr_plus.core.kinds import ALIASES, KINDS
from mcr_plus.core.units import Range, about, format_size, parse_duration, parse_range, parse_size
from mcr_plus.engine.options import DispatchOptions
from mcr_plus.errors import ConfigError, InvalidArgument, LaunchError
from mcr_plus.fusion.options import FuseOptions
from mcr_plus.hierarchy.options import HierarchicalOptions
from mcr_plus.selection.options import SelectOptions
from mcr_plus.tables.table import parse_table

MIB = 1 << 20
EXAMPLE = """\
version: 1
backends: [mpi, gloo]                 # order = fallback order
pipeline:
  - compress: {codec: none}
  - select:   {table: tables/two_ranks.yaml}
  - dispatch: {timeout: 300s}
rules:                                # first match wins; only what it names is overridden
  - match: {kind: all_to_all, tag: "moe.*", bytes: ">=1MiB"}
    compress: {codec: bf16}
  - match: {param: "*.bias"}
    compress: {codec: fp16}
    dispatch: {timeout: 5s}
  - match: {kind: broadcast}
    backend: mpi
"""


@pytest.fixture(autouse=True)
def _restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove registered names, and read no configuration of the person who runs the tests."""
    monkeypatch.delenv("MCR_CONFIG", raising=False)
    for name, entries in registry.REGISTRIES.items():
        monkeypatch.setitem(registry.REGISTRIES, name, dict(entries))


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loads(text, "run.yaml")
    return str(caught.value)


# --- Valid values ---------------------------------------------------------------------------------------


def test_the_example_of_the_documentation() -> None:
    config = loads(EXAMPLE, "conf/run.yaml")
    assert config.backends == ("mpi", "gloo")
    assert [stage.name for stage in config.pipeline] == ["compress", "select", "dispatch"]
    assert [stage.place for stage in config.pipeline] == [f"conf/run.yaml:{line}" for line in (4, 5, 6)]
    lines = enumerate((8, 10, 13))
    assert [rule.place for rule in config.rules] == [f"conf/run.yaml:{n}: rules[{i}]" for i, n in lines]
    assert config.rules[0].match.bytes == Range(MIB)
    assert config.rules[2].backend == "mpi"


@pytest.mark.parametrize(
    "config", [Config(), load(None), load({}), load({"version": 1}), loads("version: 1")]
)
def test_the_default(config: Config) -> None:
    assert config == Config()
    assert config.backends is None
    assert [(s.name, s.options) for s in config.pipeline] == [
        ("hierarchical", HierarchicalOptions()),
        ("compress", CompressOptions(codec="none")),
        ("select", SelectOptions(table=None)),
        ("dispatch", DispatchOptions(timeout=300.0, check="first", wait="auto")),
    ]
    assert config.rules == ()


def test_named_libraries_take_no_steps_unless_the_pipeline_names_them() -> None:
    for config in (load({"backends": ["gloo"]}), Config().with_backends(["gloo"])):
        assert [spec.name for spec in config.pipeline] == ["compress", "select", "dispatch"]
    written = load({"pipeline": [{"hierarchical": {}}, {"select": {}}, {"dispatch": {}}]})
    assert written.with_backends(["gloo"]).options("hierarchical") == HierarchicalOptions()


def test_stages_may_have_no_options_written() -> None:
    written = loads("version: 1\npipeline: [hierarchical:, compress:, select: {}, dispatch:]\n")
    assert written == Config()


def test_omitted_stage_has_no_options() -> None:
    config = load({"pipeline": [{"select": None}, {"dispatch": None}]})
    assert config.options("compress") is None
    assert config.options("dispatch") == DispatchOptions()


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "env.yaml"
    path.write_text("version: 1\nbackends: [gloo]\n")
    monkeypatch.setenv("MCR_CONFIG", str(path))
    assert load(None).backends == ("gloo",)
    assert load({}).backends is None
    monkeypatch.setenv("MCR_CONFIG", str(tmp_path / "absent.yaml"))
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot read: No such file"):
        load(None)
    monkeypatch.setenv("MCR_CONFIG", "")
    assert load(None) == Config()


def test_configurations_are_frozen_and_hashable() -> None:
    config = loads(EXAMPLE)
    options = config.options("dispatch")
    assert isinstance(options, DispatchOptions)
    with pytest.raises(Exception, match="frozen"):
        options.timeout = 3.0
    with pytest.raises(AttributeError):
        config.version = 2  # type: ignore[misc]
    assert hash(config) == hash(loads(EXAMPLE))


def test_yaml_stays_plain_data() -> None:
    config = load({"rules": [{"match": {"tag": "x"}, "dispatch": {"timeout": 1}}]})
    assert config == loads("version: 1\nrules: [{match: {tag: 'x'}, dispatch: {timeout: 1}}]")
    dated = loads("version: 1\nrules: [{match: {tag: 2020-01-01}, backend: mpi}]")
    assert dated.rules[0].match.tag == "2020-01-01"


# --- Files that are refused -----------------------------------------------------------------------------

PIPE = "version: 1\npipeline:\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "version: 1\nspeed: 3\n",
            "2: speed: unknown key 'speed'; known: version, backends, algorithms, numerics, elastic",
        ),
        ("version: 1\nbackend: [mpi]\n", "2: backend: unknown key 'backend'; known: "),
        ("backends: [mpi]\n", "1: version: missing; expected version: 1"),
        ("\nversion: 2\n", "2: version: unknown version 2; known: 1"),
        ("version: '1'\n", "1: version: unknown version '1'; known: 1"),
        ("version: 1.0\n", "1: version: unknown version 1.0"),
        ("version: yes\n", "1: version: unknown version True"),
        ("version: 1\nbackends: []\n", "2: backends: empty list"),
        ("version: 1\nbackends: mpi\n", "2: backends: expected a list, got 'mpi'"),
        ("version: 1\nbackends:\n  - mpi\n  - ncll\n", "4: backends[1]: unknown backend 'ncll'; known: "),
        (
            "version: 1\nbackends: [ncll]\n",
            "2: backends[0]: unknown backend 'ncll'; known: gloo, local, mpi, msccl, nccl",
        ),
        ("version: 1\nbackends: [mpi, mpi]\n", "2: backends[1]: backend 'mpi' is written twice"),
        (
            "version: 1\nbackends: [msccl, shm]\n",
            "2: backends[1]: backend 'msccl' is written twice, as 'shm' too; expected it once",
        ),
        ("version: 1\nbackends: [[mpi]]\n", "2: backends[0]: unknown backend ['mpi']"),
        ("version: 1\npipeline: []\n", "2: pipeline: empty pipeline"),
        ("version: 1\npipeline: {select: {}}\n", "2: pipeline: expected a list"),
        (PIPE + "  - select\n", "3: pipeline[0]: expected one stage with its options"),
        (PIPE + "  - {select: {}, dispatch: {}}\n", "3: pipeline[0]: expected one stage with its options"),
        (PIPE + "  - {}\n", "3: pipeline[0]: expected one stage with its options"),
        (
            PIPE + "  - chunking: {}\n",
            "3: pipeline[0].chunking: unknown stage 'chunking'; known: compress, dispatch",
        ),
        (PIPE + "  - dispach: {}\n", "3: pipeline[0].dispach: unknown stage 'dispach'; known: "),
        (
            PIPE + "  - dispatch: {}\n  - select: {}\n",
            "4: pipeline[1].select: stage 'select' comes after 'dispatch'",
        ),
        (
            PIPE + "  - select: {}\n  - compress: {}\n  - dispatch: {}\n",
            "4: pipeline[1].compress: stage 'compress'",
        ),
        (
            PIPE + "  - select: {}\n  - select: {}\n  - dispatch: {}\n",
            "4: pipeline[1].select: cyclic pipeline",
        ),
        (
            PIPE + "  - select: {}\n  - dispatch: {}\n  - select: {}\n",
            "5: pipeline[2].select: cyclic pipeline",
        ),
        (PIPE + "  - select: 5\n  - dispatch: {}\n", "3: pipeline[0].select: expected a mapping, got 5"),
        (
            PIPE + "  - compress: bf16\n  - select: {}\n  - dispatch: {}\n",
            "3: pipeline[0].compress: expected a mapping such as {codec: int8_block}, got 'bf16'",
        ),
        (
            PIPE + "  - hierarchical: {local: {compress: {}}}\n  - select: {}\n  - dispatch: {}\n",
            "3: pipeline[0].hierarchical.local.compress: unknown key 'compress'; known: backend",
        ),
        (
            PIPE + "  - hierarchical: {local: mpi}\n  - select: {}\n  - dispatch: {}\n",
            "3: pipeline[0].hierarchical.local: expected a mapping of options, got 'mpi'",
        ),
        (PIPE + "  - select: []\n  - dispatch: {}\n", "3: pipeline[0].select: expected a mapping, got []"),
        (
            PIPE + "  - select: {tabel: x}\n  - dispatch: {}\n",
            "3: pipeline[0].select.tabel: unknown key 'tabel'",
        ),
        (
            PIPE + "  - select: {table: 5}\n  - dispatch: {}\n",
            "3: pipeline[0].select.table: expected the path",
        ),
        ("version: 1\nrules: {}\n", "2: rules: expected a list"),
        ("version: 1\nrules: [5]\n", "2: rules[0]: expected a mapping, got 5"),
    ],
)
def test_refused_files(text: str, expected: str) -> None:
    assert refusal(text).startswith(f"run.yaml:{expected}")


def test_the_message_of_the_issue() -> None:
    text = (
        PIPE + "  - compress:\n\n\n      # a comment\n      codec: int9\n  - select: {}\n  - dispatch: {}\n"
    )
    place = "run.yaml:7: pipeline[0].compress.codec: "
    assert refusal(text).startswith(f"{place}unknown codec 'int9'; known: bf16, delta, ")


SHARED_MEMORY = """
version: 1
backends: [NAME, gloo]
pipeline:
  - hierarchical: {local: {backend: NAME}, inter: {backend: gloo}}
  - select: {}
  - dispatch: {}
rules:
  - {match: {kind: barrier}, backend: NAME}
  - {match: {kind: all_reduce}, backend: "NAME:ring"}
"""


def test_shm_is_another_name_of_msccl() -> None:
    written, stored = (loads(SHARED_MEMORY.replace("NAME", name)) for name in ("shm", "msccl"))
    assert written == stored
    assert fingerprint(written) == fingerprint(stored)
    assert dump(written) == dump(stored)
    assert written.backends == ("msccl", "gloo")
    assert [rule.backend for rule in written.rules] == ["msccl", "msccl:ring"]
    assert stored.with_backends(["shm", "gloo"]) == stored
    with pytest.raises(ConfigError, match=r"backend 'msccl' is not in backends; known: gloo$"):
        loads("version: 1\nbackends: [gloo]\nrules: [{match: {tag: x}, backend: shm}]")
    with pytest.raises(ConfigError, match="'msccl:' names no algorithm"):
        loads('version: 1\nrules: [{match: {tag: x}, backend: "shm:"}]')


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("version: 1\nbackends: [ncll]\n", "did you mean 'nccl'?"),
        ("version: 1\npipelin: []\n", "did you mean 'pipeline'?"),
        (PIPE + "  - dispach: {}\n", "did you mean 'dispatch'?"),
        ("version: 1\nrules: [{match: {kind: allreduce}, backend: mpi}]\n", "did you mean 'all_reduce'?"),
        (PIPE + "  - compress: {codec: bf61}\n  - select:\n  - dispatch:\n", "did you mean 'bf16'?"),
        (PIPE + "  - compress: {codec: int8}\n  - select:\n  - dispatch:\n", "did you mean 'int8_block'?"),
        (PIPE + "  - compress: {codec: exp}\n  - select:\n  - dispatch:\n", "did you mean 'exp_window'?"),
        (PIPE + "  - select:\n  - dispatch: {check: evry}\n", "did you mean 'every'?"),
        (PIPE + "  - compress: {codec: onebit}\n  - select:\n  - dispatch:\n", "sign1, topk"),
        (PIPE + "  - compress: {codec: 1bit}\n  - select:\n  - dispatch:\n", "sign1, topk"),
    ],
)
def test_near_misses_get_a_hint(text: str, hint: str) -> None:
    assert refusal(text).endswith(hint)


def test_words_that_yaml_reads_as_booleans() -> None:
    text = PIPE + "  - compress: {codec: off}\n  - select:\n  - dispatch: {verify: yes, check: on}\n"
    codec, check, verify = refusal(text).splitlines()
    assert "unknown codec False (false, no or off in YAML); known: bf16, " in codec
    assert "unknown value True (true, yes or on in YAML); known: first, every" in check
    assert verify.endswith("or a number N for every Nth operation, got True (true, yes or on in YAML)")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"compress": {"codec": "int9"}}, "compress.codec: unknown codec 'int9'; known: bf16, delta, "),
        ({"compress": {"codec": None}}, "compress.codec: unknown codec None"),
        ({"compress": {"codec": ["bf16"]}}, "compress.codec: unknown codec ['bf16']"),
        (
            {"compress": {"codec": "bf16", "ratio": 1}},
            "compress.ratio: unknown key 'ratio'; known: audit_every, codec, ef21",
        ),
        ({"compress": {"ratio": 1}}, "compress.ratio: unknown key 'ratio'; known: audit_every, codec, ef21"),
        ({"compress": {"codec_options": {}}}, "compress.codec_options: unknown key"),
        ({"select": {"table": ""}}, "select.table: expected the path of a table file, got ''"),
        ({"select": {"table": "a\0b"}}, "select.table: expected the path of a table file"),
        (
            {"dispatch": {"timeout": "300KB"}},
            "dispatch.timeout: wrong unit 'KB'; expected seconds or ms, s, min",
        ),
        (
            {"dispatch": {"timeout": 0}},
            "dispatch.timeout: expected a duration that is finite and more than 0",
        ),
        (
            {"dispatch": {"heartbeat": "soon"}},
            "dispatch.heartbeat: expected a duration such as 300s or a number",
        ),
        ({"dispatch": {"heartbeat": 0.1}}, "dispatch.heartbeat: expected at least 0.5 s, got 0.1"),
        (
            {"dispatch": {"stopped": "never"}},
            "dispatch.stopped: expected a duration such as 300s or a number",
        ),
        ({"dispatch": {"timeout": "-5s"}}, "dispatch.timeout: expected a duration that is finite"),
        ({"dispatch": {"timeout": float("nan")}}, "dispatch.timeout: expected a duration that is finite"),
        ({"dispatch": {"timeout": float("inf")}}, "dispatch.timeout: expected a duration that is finite"),
        ({"dispatch": {"timeout": 10**400}}, "dispatch.timeout: expected a duration that is finite"),
        ({"dispatch": {"timeout": True}}, "dispatch.timeout: expected a duration such as 300s"),
        ({"dispatch": {"timeout": None}}, "dispatch.timeout: expected a duration such as 300s"),
        ({"dispatch": {"timeout": "soon"}}, "dispatch.timeout: expected a duration such as 300s"),
        ({"dispatch": {"check": "always"}}, "dispatch.check: unknown value 'always'; known: first, every"),
        (
            {"dispatch": {"wait": "nap"}},
            "dispatch.wait: unknown value 'nap'; known: auto, spin, yield, sleep",
        ),
        (
            {"dispatch": {"colour": 1}},
            "dispatch.colour: unknown key 'colour'; known: check, failover, heartbeat, progress, stopped, "
            "timeout, verify, wait",
        ),
    ],
)
def test_refused_options(options: dict[str, Any], expected: str) -> None:
    (name,) = options
    with pytest.raises(ConfigError) as caught:
        stage_options(name, options[name])
    assert str(caught.value).startswith(f"configuration: {expected}")
    pipeline = [options if stage == name else {stage: {}} for stage in ("compress", "select", "dispatch")]
    with pytest.raises(ConfigError) as caught:
        load({"pipeline": pipeline})
    index = ("compress", "select", "dispatch").index(name)
    assert str(caught.value).startswith(f"configuration: pipeline[{index}].{expected}")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("{backend: mpi}", "rules[0]: no match"),
        (
            "{kind: all_reduce, backend: mpi}",
            "rules[0]: kind is outside of match; expected match: {kind: all_reduce}",
        ),
        ("{match: {}, backend: mpi}", "rules[0].match: empty match; expected at least one of kind"),
        ("{match: null, backend: mpi}", "rules[0].match: empty match"),
        ("{match: {tag: null}, backend: mpi}", "rules[0].match: empty match"),
        ("{match: all_reduce, backend: mpi}", "rules[0].match: expected a mapping"),
        (
            "{match: {tag: x}}",
            "rules[0]: changes nothing; expected at least one of backend, sums, compress",
        ),
        ("{match: {tag: x}, dispatch: {}}", "rules[0]: changes nothing"),
        ("{match: {tag: x}, backend: ncll}", "rules[0].backend: unknown backend 'ncll'"),
        (
            "{match: {tag: x}, backend: nccl}",
            "rules[0].backend: backend 'nccl' is not in backends; known: mpi, gloo",
        ),
        ("{match: {tag: x}, backend: [mpi]}", "rules[0].backend: unknown backend ['mpi']"),
        (
            "{match: {tag: x}, colour: red}",
            "rules[0].colour: unknown key 'colour'; known: match, backend, sums, compress",
        ),
        ("{match: {tag: x}, fuse: {}}", "rules[0].fuse: stage 'fuse' is not in the pipeline"),
        (
            "{match: {tga: x}, backend: mpi}",
            "rules[0].match.tga: unknown key 'tga'; known: bytes, dtype, kind",
        ),
        ("{match: {kind: allreduce}, backend: mpi}", "rules[0].match.kind: unknown kind 'allreduce'"),
        ("{match: {kind: recv}, backend: mpi}", "rules[0].match.kind: a recv is treated like its send"),
        ("{match: {kind: []}, backend: mpi}", "rules[0].match.kind: empty list"),
        ("{match: {kind: [send, 5]}, backend: mpi}", "rules[0].match.kind: unknown kind 5"),
        ("{match: {dtype: float}, backend: mpi}", "rules[0].match.dtype: unknown dtype 'float'"),
        ("{match: {tag: 5}, backend: mpi}", "rules[0].match.tag: expected a string, got 5"),
        ("{match: {tag: ''}, backend: mpi}", "rules[0].match.tag: "),
        (
            "{match: {bytes: 1KB}, backend: mpi}",
            "rules[0].match.bytes: wrong unit 'KB'; expected bytes or B, KiB",
        ),
        ("{match: {bytes: '>=1 mib'}, backend: mpi}", "rules[0].match.bytes: wrong unit 'mib'"),
        ("{match: {bytes: 2..1}, backend: mpi}", "rules[0].match.bytes: empty range"),
        ("{match: {bytes: '<0'}, backend: mpi}", "rules[0].match.bytes: empty range"),
        ("{match: {bytes: '~5'}, backend: mpi}", "rules[0].match.bytes: expected a size"),
        ("{match: {bytes: ''}, backend: mpi}", "rules[0].match.bytes: expected a size"),
        ("{match: {bytes: .nan}, backend: mpi}", "rules[0].match.bytes: expected a size"),
        ("{match: {bytes: -1}, backend: mpi}", "rules[0].match.bytes: expected a size"),
        ("{match: {ranks: 2KiB}, backend: mpi}", "rules[0].match.ranks: expected a whole number"),
        ("{match: {ranks: 2.5}, backend: mpi}", "rules[0].match.ranks: expected a whole number"),
        ("{match: {tag: x}, compress: {codec: int9}}", "rules[0].compress.codec: unknown codec 'int9'"),
        ("{match: {tag: x}, compress: {ratio: 2}}", "rules[0].compress.ratio: unknown key 'ratio'"),
        ("{match: {tag: x}, dispatch: {timeout: 5h}}", "rules[0].dispatch.timeout: wrong unit 'h'"),
        ("{match: {tag: x}, dispatch: [1]}", "rules[0].dispatch: expected a mapping"),
    ],
)
def test_refused_rules(rule: str, expected: str) -> None:
    text = f"version: 1\nbackends: [mpi, gloo]\nrules:\n  - {rule}\n"
    assert refusal(text).startswith(f"run.yaml:4: {expected}")


def test_a_rule_for_a_stage_that_is_not_there() -> None:
    text = PIPE + "  - select:\n  - dispatch:\nrules:\n  - match: {tag: x}\n    compress: {codec: bf16}\n"
    assert refusal(text).startswith("run.yaml:7: rules[0].compress: stage 'compress' is not in the pipeline")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "1: document: expected a mapping at the root, got an empty document"),
        ("# nothing\n", "1: document: expected a mapping"),
        ("- 1\n", "1: document: expected a mapping at the root, got a list"),
        ("hello\n", "1: document: expected a mapping at the root, got a string"),
        ("version: 1\n---\nversion: 1\n", "2: document: not valid YAML"),
        ("version: 1\nversion: 1\n", "2: version: written twice, first at line 1"),
        (PIPE + "  - select: {table: a, table: b}\n", "3: pipeline[0].select.table: written twice"),
        ("version: !other {a: 1}\n", "1: document: tag"),
        ("version: 1\nrules: !!python/object:builtins.object {}\n", "2: document: tag"),
        ("version: !!int 1\n", "1: document: tag"),
        ("version: !mine 1\n", "1: document: tag"),
        ("!!map\nversion: 1\n", "1: document: tag"),
        ("version: &a 1\n", "1: document: anchors are refused"),
        ("version: 1\nbackends: &a [*a]\n", "2: document: anchors are refused"),
        ("version: 1\nbackends: *all\n", "2: document: aliases are refused"),
        ("version: 1\n<<: {backends: [mpi]}\n", "2: <<: unknown key '<<'"),
        ("version: 1\n1: 2\n", "2: document: expected a name as key, got '1'"),
        ("version: 1\n[a]: 2\n", "2: document: expected a name as key, got a list"),
        ("version: 1\n? {a: 1}\n: 2\n", "2: document: expected a name as key, got a mapping"),
        ("version: 1\nbackends: [mpi\n", "3: document: not valid YAML"),
        ("version: 1\n\tbackends: [mpi]\n", "2: document: not valid YAML"),
        ("version: 1\nx: \x07\n", "2: document: not valid YAML: character"),
        ("version: 1\nrules:\n  - match: {bytes: >=1MiB}\n", "3: document: not valid YAML"),
        ("version: 1\nrules:\n  - match:\n      bytes: >=1MiB\n", "4: document: not valid YAML"),
        ("version: 1\nrules: " + "[" * 100 + "]" * 100, "2: document: nested more than 32 levels deep"),
        ("version: 1\nrules: " + "[" * 40, "2: document: nested more than 32 levels deep"),
        ("version: " + "9" * 5000, "1: version: a number of 5,000 digits; expected at most 100"),
        ("version: 0x" + "f" * 5000, "1: version: a number of 5,002 digits; expected at most 100"),
        ("version: 0x_\n", "1: version: "),
        ('version: "\\ud800"\n', "1: version: 'utf-8' codec can't encode character '\\ud800'"),
        ('version: "\\U00110000"\n', "1: document: not valid YAML: "),
    ],
)
def test_yaml_that_is_more_than_plain_data(text: str, expected: str) -> None:
    assert refusal(text).startswith(f"run.yaml:{expected}")


@pytest.mark.parametrize(
    "text",
    ["password=hunter2\n", "password: hunter2\n", "hunter2: 1\nhunter2: 2\n", "- hunter2\n", "1: hunter2\n"],
)
def test_nothing_of_a_foreign_file_is_quoted(text: str) -> None:
    assert "hunter2" not in refusal(text)
    with pytest.raises(ConfigError) as refused:
        parse_table(text, "table.yaml")
    assert str(refused.value).startswith("table.yaml:1: ")
    assert "hunter2" not in str(refused.value)


def test_an_unquoted_comparison_gets_a_hint() -> None:
    assert refusal("version: 1\nrules:\n  - match:\n      bytes: >=1MiB\n").endswith("in quotes")


def test_no_tag_is_ever_run(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    path = f"!!python/object/apply:pathlib.Path ['{witness}']"
    assert "tag" in refusal(f"version: 1\nx: !!python/object/apply:pathlib.Path.touch [{path}]")
    assert not witness.exists()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "big.yaml").write_text("version: 1\n" + "#" * MIB)
    (tmp_path / "latin.yaml").write_bytes(b"version: 1 # \xe9\n")
    reasons = {
        "big.yaml": "larger than 1 MiB",
        "latin.yaml": "not UTF-8 at byte 13",
        "no.yaml": "cannot read",
    }
    for name, what in reasons.items():
        with pytest.raises(ConfigError, match=what) as caught:
            load(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}: ")
    for odd in (tmp_path, "a\0b", "x" * 5000):
        with pytest.raises(ConfigError, match="cannot read"):
            load(odd)
    others: tuple[Any, ...] = (42, [], "", b"mcr.yaml")
    for other in others:
        with pytest.raises(InvalidArgument, match="config: expected the path of a file, a dict or None, got"):
            load(other)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfversion: 1\n")
    assert load(path) == Config()


def cyclic() -> dict[str, Any]:
    data: dict[str, Any] = {"version": 1}
    data["pipeline"] = [data]
    return data


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"speed": 3}, "speed: unknown key 'speed'"),
        ({"version": 2}, "version: unknown version 2"),
        ({"backends": ["ncll"]}, "backends[0]: unknown backend 'ncll'"),
        ({"backends": {"mpi"}}, "backends: expected plain data, got {'mpi'}"),
        ({1: 2}, "document: expected a name as key, got 1"),
        (cyclic(), "pipeline[0]: nested more than 32 levels deep, or contains itself"),
    ],
)
def test_refused_dicts(data: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(data)
    assert str(caught.value).startswith(f"configuration: {expected}")


# --- Sizes, durations, ranges, kinds --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (0, 0),
        (7, 7),
        ("7", 7),
        ("7B", 7),
        ("64KiB", 65536),
        ("64 KiB", 65536),
        ("25MiB", 26214400),
        ("1GiB", 1 << 30),
    ],
)
def test_sizes(value: object, nbytes: int) -> None:
    assert parse_size(value) == nbytes


@pytest.mark.parametrize("value", ["1KB", "1kb", "1MB", "1k", "1s", "5 bits"])
def test_wrong_units_of_size(value: str) -> None:
    with pytest.raises(ValueError, match=r"wrong unit .*expected bytes or B, KiB, MiB, GiB"):
        parse_size(value)


@pytest.mark.parametrize(
    "value",
    [
        -1,
        1.0,
        1.5,
        float("nan"),
        True,
        None,
        [],
        "",
        "KiB",
        "-1KiB",
        "1.5MiB",
        "nan",
        "1e3",
        "٣",
        1 << 63,
        "9" * 30,
    ],
)
def test_invalid_sizes_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="expected a size such as 64KiB"):
        parse_size(value)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (96, "96 B"),
        (8 << 20, "8 MiB"),
        (42257613, "40.3 MiB"),
        (3 << 40, "3,072 GiB"),
    ],
)
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert about(nbytes) == text


@given(st.integers(0, (1 << 63) - 1))
def test_sizes_round_trip(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(300, 300), (0.5, 0.5), ("300s", 300), ("5ms", 0.005), ("2min", 120), ("1.5 s", 1.5), ("7", 7)],
)
def test_durations(value: object, seconds: float) -> None:
    assert parse_duration(value) == seconds


@pytest.mark.parametrize(
    ("value", "inside", "outside"),
    [
        (5, [5], [4, 6]),
        ("5", [5], [4, 6]),
        ("1KiB", [1024], [1023, 1025]),
        ("==5", [5], [4, 6]),
        (">=1MiB", [MIB, 1 << 50, None], [MIB - 1, 0]),
        (">1MiB", [MIB + 1, None], [MIB]),
        ("<4KiB", [0, 4095], [4096, None]),
        ("<= 4KiB", [0, 4096], [4097, None]),
        ("64KiB..1MiB", [65536, MIB - 1], [65535, MIB, None]),
        ("64KiB ..", [65536, 1 << 60, None], [65535]),
        ("0..", [0, None], []),
    ],
)
def test_ranges(value: object, inside: list[int | None], outside: list[int | None]) -> None:
    found = parse_range(value)
    assert all(found.covers(n) for n in inside)
    assert not any(found.covers(n) for n in outside)
    assert parse_range(str(found)) == found


@pytest.mark.parametrize("value", ["..", "..5", "1..2..3", "1...5", "> =5", "=5", "!=5", "*", None, [1, 2]])
def test_invalid_ranges_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        parse_range(value)


def test_kinds_cover_their_vector_form() -> None:
    covered = {pattern: {kind for kind in KINDS if kind_matches(pattern, kind)} for pattern in KINDS}
    for kind in KINDS:
        expected = {kind, f"{kind}_v"} if f"{kind}_v" in KINDS else {kind}
        expected |= {"recv"} if kind == "send" else set()  # both ends of a message take the same way
        assert covered[kind] == expected
        assert kind_matches("*", kind)


# --- Rules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "index"),
    [
        ({"kind": "all_to_all", "nbytes": MIB, "tag": "moe.dispatch"}, 0),
        ({"kind": "all_to_all_v", "nbytes": None, "tag": "moe.dispatch"}, 0),
        ({"kind": "all_to_all", "nbytes": MIB - 1, "tag": "moe.dispatch"}, None),
        ({"kind": "all_to_all", "nbytes": MIB, "tag": "Moe.dispatch"}, None),
        ({"kind": "all_to_all", "nbytes": MIB, "tag": None}, None),
        ({"kind": "all_reduce", "nbytes": MIB, "tag": "moe.dispatch"}, None),
        ({"kind": "all_to_all", "nbytes": MIB, "tag": "moe.x", "param": "mlp.bias"}, 0),
        ({"kind": "all_reduce", "nbytes": 8, "tag": None, "param": "mlp.bias"}, 1),
        ({"kind": "broadcast", "nbytes": 8, "tag": None, "param": "mlp.bias"}, 1),
        ({"kind": "broadcast", "nbytes": 8, "tag": None}, 2),
    ],
)
def test_the_first_rule_that_matches(op: dict[str, Any], index: int | None) -> None:
    config = loads(EXAMPLE)
    found = config.rule_for(dtype="float32", **op)
    assert found is (None if index is None else config.rules[index])


@pytest.mark.parametrize(
    ("match", "matching", "other"),
    [
        ({"dtype": "float32"}, {"dtype": "float32"}, {"dtype": "float16"}),
        ({"dtype": ["float16", "bfloat16"]}, {"dtype": "bfloat16"}, {"dtype": "float32"}),
        ({"kind": ["send", "reduce"]}, {"kind": "recv"}, {"kind": "all_reduce"}),
        ({"ranks": 4}, {"ranks": 4}, {"ranks": 3}),
        ({"ranks": ">=4"}, {"ranks": 9}, {"ranks": 3}),
        ({"ranks": ">=4"}, {"ranks": 9}, {"ranks": None}),
    ],
)
def test_fields_of_a_match(match: dict[str, Any], matching: dict[str, Any], other: dict[str, Any]) -> None:
    config = load({"rules": [{"match": match, "backend": "mpi"}]})
    op: dict[str, Any] = {"kind": "all_reduce", "nbytes": 8, "dtype": "float32", "ranks": 2}
    assert config.rule_for(**{**op, **matching}) is config.rules[0]
    assert config.rule_for(**{**op, **other}) is None


@pytest.mark.parametrize(("spelling", "kind"), ALIASES.items())
def test_kinds_may_be_spelt_as_calls_spell_them(spelling: str, kind: str) -> None:
    config = load({"rules": [{"match": {"kind": ["barrier", spelling]}, "backend": "mpi"}]})
    assert config.rule_for(kind, 8, "float32") is config.rules[0]
    assert dump(config)["rules"][0]["match"] == {"kind": ["barrier", kind]}
    same = load({"rules": [{"match": {"kind": ["barrier", kind]}, "backend": "mpi"}]})
    assert config == same
    assert fingerprint(config) == fingerprint(same)


def test_rules_override_only_their_own_fields() -> None:
    config = load(
        {
            "pipeline": [{"select": {}}, {"dispatch": {"timeout": 60, "wait": "spin"}}],
            "rules": [{"match": {"kind": "send"}, "dispatch": {"timeout": "5s"}}],
        }
    )
    (rule,) = config.rules
    assert config.options("dispatch") == DispatchOptions(timeout=60.0, wait="spin")
    assert config.options("dispatch", rule) == DispatchOptions(timeout=5.0, wait="spin")
    assert config.options("select", rule) == SelectOptions()
    assert rule.options("select") is None
    assert dump(config)["rules"] == [{"match": {"kind": ["send"]}, "dispatch": {"timeout": 5.0}}]


def test_places_are_not_compared() -> None:
    one, other = loads(EXAMPLE, "a.yaml"), loads("\n\n" + EXAMPLE, "b/c.yaml")
    assert one == other
    assert one.rules[0].place != other.rules[0].place


def test_with_backends() -> None:
    config = loads(EXAMPLE, "run.yaml")
    assert config.with_backends(["gloo", "mpi"]).backends == ("gloo", "mpi")
    assert config.with_backends(["gloo", "mpi"]).rules[0].place == "run.yaml:8: rules[0]"
    for names, what in [
        (["ncll"], "backends[0]: unknown backend 'ncll'"),
        ([], "backends: empty"),
        (["gloo"], "run.yaml:13: rules[2].backend: backend 'mpi' is not in backends; known: gloo"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(what)):
            config.with_backends(names)


# --- Stages and codecs of other packages ----------------------------------------------------------------


class SketchOptions(BaseModel):
    model_config = {"extra": "forbid"}
    ratio: float
    exact: bool = False


def sketch() -> SimpleNamespace:
    return SimpleNamespace(Options=SketchOptions)


def test_a_codec_with_options_of_its_own() -> None:
    registry.register("codecs", "sketch", sketch())
    options = stage_options("compress", {"codec": "sketch", "ratio": 0.01})
    assert options == CompressOptions(codec="sketch", codec_options=SketchOptions(ratio=0.01))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"codec": "sketch"}, "compress.ratio: missing"),
        ({"codec": "sketch", "ratio": "much"}, "compress.ratio: expected a number"),
        ({"codec": "sketch", "ratio": 1, "x": 1}, "compress.x: unknown key 'x'; known: audit_every, codec"),
    ]
    for options_given, what in cases:
        with pytest.raises(ConfigError, match=re.escape(what)):
            stage_options("compress", options_given)


def test_a_rule_changes_one_option_of_a_codec_or_the_codec() -> None:
    registry.register("codecs", "sketch", sketch())
    config = load(
        {
            "pipeline": [{"compress": {"codec": "sketch", "ratio": 0.1}}, {"select": {}}, {"dispatch": {}}],
            "rules": [
                {"match": {"tag": "a"}, "compress": {"exact": True}},
                {"match": {"tag": "b"}, "compress": {"codec": "bf16"}},
            ],
        }
    )
    first, second = config.rules
    assert first.options("compress") == CompressOptions(
        codec="sketch", codec_options=SketchOptions(ratio=0.1, exact=True)
    )
    changed = second.options("compress")
    assert isinstance(changed, CompressOptions)
    assert changed.codec == "bf16"
    assert dump(config)["rules"][0]["compress"] == {"exact": True}
    assert load(dump(config)) == config


class AuditOptions(BaseModel):
    model_config = {"extra": "forbid", "frozen": True}
    every: int = 10


class Audit:
    Options = AuditOptions


def test_a_stage_of_another_package() -> None:
    registry.register("stages", "audit", Audit)
    config = load({"pipeline": [{"audit": {"every": 3}}, {"select": {}}, {"dispatch": {}}]})
    assert config.options("audit") == AuditOptions(every=3)
    assert load(dump(config)) == config
    last: dict[str, Any] = {"pipeline": [{"select": {}}, {"dispatch": {}}, {"audit": {}}]}
    with pytest.raises(ConfigError, match=r"pipeline\[2\]\.audit: .*expected dispatch last"):
        load(last)
    with pytest.raises(ConfigError, match=r"pipeline\[0\]\.audit\.x: unknown key 'x'; known: every"):
        load({"pipeline": [{"audit": {"x": 3}}, {"select": {}}, {"dispatch": {}}]})


@pytest.mark.parametrize(
    ("stage", "what"),
    [
        ("no_such_package_anywhere:Stage", "cannot be loaded: ModuleNotFoundError"),
        (SimpleNamespace(Options=dict), "expected a pydantic model"),
        (SimpleNamespace(), "unknown key 'x'; known: none, it takes no options"),
    ],
)
def test_stages_of_other_packages_that_are_wrong(stage: object, what: str) -> None:
    registry.register("stages", "odd", stage)
    with pytest.raises(ConfigError, match=re.escape(what)) as caught:
        load({"pipeline": [{"odd": {"x": 1}}, {"select": {}}, {"dispatch": {}}]})
    assert str(caught.value).startswith("configuration: pipeline[0].odd")


# --- Dump, load, fingerprint ----------------------------------------------------------------------------

names = st.text("abcxyz.*?[]", min_size=1, max_size=8)
sizes = st.integers(0, 1 << 40)
ranges = st.one_of(
    sizes,
    sizes.map(lambda n: f">={n}"),
    sizes.map(lambda n: f"<{n + 1}KiB"),
    st.tuples(sizes, st.integers(1, 1 << 20)).map(lambda t: f"{t[0]}..{t[0] + t[1]}"),
)
durations = st.one_of(st.integers(1, 10**6), st.integers(1, 999).map("{}ms".format), st.floats(1e-6, 1e6))
codecs = st.sampled_from(["none", "bf16", "fp16"])
NAMED = [kind for kind in KINDS if kind != "recv"]
compress = st.fixed_dictionaries({}, optional={"codec": codecs})
select = st.fixed_dictionaries({}, optional={"table": st.one_of(st.none(), names)})
dispatch = st.fixed_dictionaries(
    {},
    optional={
        "timeout": durations,
        "check": st.sampled_from(["first", "every"]),
        "wait": st.sampled_from(["auto", "spin", "yield", "sleep"]),
    },
)
backend_lists = st.permutations(["gloo", "mpi", "local", "nccl"])
matches = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.one_of(st.sampled_from(NAMED), st.lists(st.sampled_from(NAMED), min_size=1, max_size=3)),
        "tag": names,
        "param": names,
        "bytes": ranges,
        "dtype": st.sampled_from(["float32", "bfloat16", "bool"]),
        "ranks": st.one_of(st.integers(1, 64), st.just(">=3")),
    },
).filter(bool)


@st.composite
def rules(draw: st.DrawFn) -> dict[str, Any]:
    rule: dict[str, Any] = {"match": draw(matches)}
    parts = {
        "backend": st.sampled_from(["gloo", "mpi"]),
        "compress": compress,
        "select": select,
        "dispatch": dispatch,
    }
    for key, values in parts.items():
        if draw(st.booleans()):
            rule[key] = draw(values)
    if not any(rule[key] for key in rule if key != "match"):
        rule["backend"] = "mpi"
    return rule


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    data: dict[str, Any] = {"version": 1}
    if draw(st.booleans()):
        data["backends"] = list(draw(backend_lists))
    if draw(st.booleans()):
        parts = {"compress": draw(compress), "select": draw(select), "dispatch": draw(dispatch)}
        data["pipeline"] = [{name: options or None} for name, options in parts.items()]
    data["rules"] = draw(st.lists(rules(), max_size=4))
    return data


@given(configurations())
def test_round_trip(data: dict[str, Any]) -> None:
    config = load(data)
    dumped = dump(config)
    assert load(dumped) == config
    assert load(json.loads(json.dumps(dumped))) == config
    assert loads(yaml.safe_dump(dumped)) == config
    assert loads(yaml.safe_dump(data)) == config
    assert dump(load(dumped)) == dumped


def test_dump_has_the_contents_of_the_file() -> None:
    assert dump(loads(EXAMPLE)) == {
        "version": 1,
        "backends": ["mpi", "gloo"],
        "pipeline": [
            {"compress": {"codec": "none"}},
            {
                "select": {
                    "table": "tables/two_ranks.yaml",
                    "vector_size": None,
                    "online": False,
                    "refined": None,
                }
            },
            {
                "dispatch": {
                    "timeout": 300.0,
                    "check": "first",
                    "wait": "auto",
                    "progress": "caller",
                    "heartbeat": "auto",
                    "stopped": 0.5,
                    "failover": False,
                    "verify": "off",
                }
            },
        ],
        "rules": [
            {
                "match": {"kind": ["all_to_all"], "tag": "moe.*", "bytes": "1048576.."},
                "compress": {"codec": "bf16"},
            },
            {"match": {"param": "*.bias"}, "compress": {"codec": "fp16"}, "dispatch": {"timeout": 5.0}},
            {"match": {"kind": ["broadcast"]}, "backend": "mpi"},
        ],
    }


def with_table(folder: Path, content: str, table: str = "t/table.yaml") -> Config:
    (folder / "t").mkdir(parents=True, exist_ok=True)
    (folder / table).write_text(content)
    path = folder / "run.yaml"
    path.write_text(f"version: 1\npipeline:\n  - select: {{table: {table}}}\n  - dispatch:\n")
    return load(path)


def test_a_table_is_found_from_the_folder_of_the_file(tmp_path: Path) -> None:
    options = with_table(tmp_path, "x").options("select")
    assert isinstance(options, SelectOptions)
    assert options.table is not None
    assert options.table.text == "t/table.yaml"
    assert options.table.resolve() == tmp_path / "t" / "table.yaml"


def test_a_table_of_a_dict_is_found_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "table.yaml").write_text("x")
    monkeypatch.chdir(tmp_path)
    options = stage_options("select", {"table": Path("table.yaml")})
    assert isinstance(options, SelectOptions)
    assert options.table is not None
    assert options.table.resolve().read_text() == "x"


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    config = with_table(tmp_path, "x")
    (tmp_path / "t" / "table.yaml").unlink()
    with pytest.raises(ConfigError) as caught:
        fingerprint(config)
    place = f"{tmp_path / 'run.yaml'}:3: pipeline[0].select.table: "
    assert str(caught.value).startswith(f"{place}no table file 't/table.yaml'")


def test_the_tables_of_a_configuration() -> None:
    config = load(
        {
            "pipeline": [{"select": {"table": "a.yaml"}}, {"dispatch": {}}],
            "rules": [
                {"match": {"tag": "x"}, "select": {"table": "b.yaml"}},
                {"match": {"tag": "y"}, "backend": "mpi"},
            ],
        }
    )
    assert [table.text for table in config.tables] == ["a.yaml", "b.yaml"]
    assert load({}).tables == ()


def test_fingerprint(tmp_path: Path) -> None:
    one = with_table(tmp_path / "a", "content")
    same = with_table(tmp_path / "b", "content", "t/other_name.yaml")
    other = with_table(tmp_path / "c", "content ")
    assert re.fullmatch("[0-9a-f]{64}", fingerprint(one))
    assert fingerprint(one) == fingerprint(same)
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(Config()) == fingerprint(loads("version: 1  # a comment"))


@pytest.mark.parametrize(
    "change",
    [
        {"backends": ["mpi", "gloo"]},
        {"backends": ["gloo", "mpi"]},
        {"pipeline": [{"select": {}}, {"dispatch": {}}]},
        {"pipeline": [{"compress": {"codec": "bf16"}}, {"select": {}}, {"dispatch": {}}]},
        {"pipeline": [{"compress": {}}, {"select": {}}, {"dispatch": {"timeout": 1}}]},
        {"rules": [{"match": {"tag": "a"}, "backend": "mpi"}]},
        {"rules": [{"match": {"tag": "b"}, "backend": "mpi"}]},
        {"rules": [{"match": {"tag": "a"}, "backend": "gloo"}]},
    ],
)
def test_all_deciding_facts_are_in_the_fingerprint(change: dict[str, Any]) -> None:
    changes: list[dict[str, Any]] = [{}, {"rules": [{"match": {"param": "a"}, "backend": "mpi"}]}]
    assert fingerprint(load(change)) not in {fingerprint(load(other)) for other in changes}
    assert fingerprint(load(change)) == fingerprint(load(dump(load(change))))


# --- The launch environment -----------------------------------------------------------------------------

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-host-77@1",
}  # fmt: skip
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "42", "SLURM_PROCID": "3", "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1(x2)",
    "SLURM_NTASKS_PER_NODE": "64",
}  # fmt: skip
SBATCH = {"SLURM_JOB_ID": "42", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key not in names}


@pytest.mark.parametrize(
    ("environ", "one", "many"),
    [
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "8"}, {}),
        (OPENMPI, {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, {}),
        (HYDRA, {"MPI_LOCALNRANKS": "8"}, {}),
        (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}, {}),
        (TORCHRUN | {"OMPI_COMM_WORLD_RANK": "0"}, {"LOCAL_WORLD_SIZE": "8"}, {"OMPI_COMM_WORLD_SIZE": "1"}),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {"LOCAL_WORLD_SIZE": "2"}, {}),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {"LOCAL_WORLD_SIZE": "2"}, {"LOCAL_WORLD_SIZE": "two"}),
    ],
)
def test_detection_of_jobs_on_one_host(
    environ: dict[str, str], one: dict[str, str], many: dict[str, str]
) -> None:
    assert on_one_host(environ | one)
    assert not on_one_host(environ | many)


FREE = {"RANK": "0", "WORLD_SIZE": "8"}
FAULT_TOLERANT = OPENMPI | {"OMPI_MCA_mpi_ft_enable": "1"}


@pytest.mark.parametrize(
    ("environ", "hosts", "expected"),
    [
        (TORCHRUN, 1, False),  # its agent outlives the ranks
        (TORCHRUN, 2, True),  # but not its host
        (TORCHRUN | {"MCR_MIN_RANKS": "2"}, 2, False),  # where processes that are started again look
        (OPENMPI, 2, False),  # ends all ranks with the first
        (FAULT_TOLERANT, 1, True),
        (HYDRA, 1, False),
        (FREE, 1, True),
        (SRUN, 2, True),
    ],
)
def test_ranks_keep_their_own_keys_by_launcher_and_hosts(
    environ: dict[str, str], hosts: int, expected: bool
) -> None:
    assert ranks_keep_their_own(hosts, environ) is expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, LaunchEnvironment(0, 1, 0, 1, "single")),
        (TORCHRUN, LaunchEnvironment(3, 8, 1, 2, "torchrun", "node0", 29400, True)),
        (
            without(TORCHRUN, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
            LaunchEnvironment(3, 8, 1, 2, "env", "node0", 29400, False),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2"}, LaunchEnvironment(1, 2, 1, 2, "env")),
        (
            TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"},
            LaunchEnvironment(3, 8, 1, 2, "torchrun", "node0", 29400, True),
        ),
        (OPENMPI, LaunchEnvironment(3, 8, 1, 2, "openmpi")),
        (HYDRA, LaunchEnvironment(3, 8, 1, 2, "mpich")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, LaunchEnvironment(1, 2, 1, 2, "mpich")),
        (without(HYDRA, "PMI_RANK") | {"PMIX_RANK": "3"}, LaunchEnvironment(3, 8, 1, 2, "mpich")),
        (SRUN, LaunchEnvironment(3, 8, 1, 2, "slurm")),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "4"}, LaunchEnvironment(3, 4, 1, 2, "slurm")),
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "8"}, LaunchEnvironment(3, 8, 1, 2, "slurm")),
        (SRUN | {"PMIX_RANK": "3"}, LaunchEnvironment(3, 8, 1, 2, "slurm")),
        (
            SRUN | {"SLURM_STEP_NODELIST": "gpu[03-05,09]-ib,cpu1", "SLURM_STEP_NUM_NODES": "5"},
            LaunchEnvironment(3, 8, 1, 2, "slurm", "gpu03-ib", 20_000 + 42 * 31),
        ),
        (
            SRUN | {"SLURM_STEP_NODELIST": "a.b,c", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_ID": "7"},
            LaunchEnvironment(3, 8, 1, 2, "slurm", "a.b", 20_007 + 42 * 31),
        ),
        (
            SRUN | {"SLURM_STEP_NODELIST": "gpu03", "SLURM_STEP_NUM_NODES": "1"},
            LaunchEnvironment(3, 8, 1, 2, "slurm", "127.0.0.1", 20_000 + 42 * 31),
        ),
        (
            SRUN | {"SLURM_STEP_NODELIST": "gpu03", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            LaunchEnvironment(3, 8, 1, 2, "slurm", "a", 1),
        ),
        (SBATCH, LaunchEnvironment(0, 1, 0, 1, "single")),
        (SBATCH | {"SLURM_STEP_ID": "4294967291"}, LaunchEnvironment(0, 1, 0, 1, "single")),
        (SBATCH | {"SLURM_STEP_ID": "4294967290"}, LaunchEnvironment(0, 1, 0, 1, "single")),
        (
            SRUN | OPENMPI | {"SLURM_PROCID": "0"},
            LaunchEnvironment(3, 8, 1, 2, "openmpi"),
        ),
        (SRUN | HYDRA | {"SLURM_PROCID": "0"}, LaunchEnvironment(3, 8, 1, 2, "mpich")),
        (
            TORCHRUN | OPENMPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"},
            LaunchEnvironment(3, 8, 1, 2, "torchrun", "node0", 29400, True),
        ),
        (
            OPENMPI | {"MASTER_ADDR": "a", "MASTER_PORT": "1", "MCR_LAUNCHER": "mcr-plus", "MCR_JOB_ID": "j"},
            LaunchEnvironment(3, 8, 1, 2, "openmpi"),  # the address is for torch's own store
        ),
        (
            TORCHRUN | {"MCR_LAUNCHER": "mcr-plus", "MCR_JOB_ID": "j"},
            LaunchEnvironment(3, 8, 1, 2, "mcr-plus", "node0", 29400, True),
        ),
        ({"MCR_LAUNCHER": "mcr-plus"}, LaunchEnvironment()),
        ({"RANK": "", "WORLD_SIZE": " "}, LaunchEnvironment()),
    ],
)
def test_launchers(environ: dict[str, str], expected: LaunchEnvironment) -> None:
    assert launch_environment(environ) == expected


@pytest.mark.parametrize(
    ("environ", "what"),
    [
        ({"RANK": "abc", "WORLD_SIZE": "2"}, "RANK='abc': expected a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1': expected a whole number"),
        ({"RANK": "1.0", "WORLD_SIZE": "2"}, "RANK='1.0': expected a whole number"),
        ({"RANK": "9" * 5000, "WORLD_SIZE": "2"}, "expected a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2: expected a number below WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0': expected a whole number from 1"),
        ({"RANK": "0"}, "WORLD_SIZE is not set, but RANK is"),
        ({"WORLD_SIZE": "2"}, "RANK is not set, but WORLD_SIZE is"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2: expected a number below LOCAL_WORLD_SIZE=2"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9: expected at most WORLD_SIZE=8"),
        (TORCHRUN | {"MASTER_PORT": "x"}, "MASTER_PORT='x'"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT='70000': expected a whole number from 0 to 65535"),
        (without(OPENMPI, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not set"),
        (OPENMPI | {"OMPI_COMM_WORLD_RANK": "8"}, "OMPI_COMM_WORLD_RANK=8"),
        (HYDRA | {"PMI_SIZE": "none"}, "PMI_SIZE='none'"),
        (without(SRUN, "SLURM_PROCID"), "SLURM_PROCID is not set"),
        (SRUN | {"SLURM_STEP_ID": "x"}, "SLURM_STEP_ID='x'"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(3)"}, "SLURM_STEP_TASKS_PER_NODE='2(3)'"),
        (SRUN | {"SLURM_NODEID": "5"}, "SLURM_NODEID=5"),
        ({"MCR_LAUNCHER": "other"}, "MCR_LAUNCHER='other'"),
    ],
)
def test_launch_environments_that_contradict_themselves(environ: dict[str, str], what: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(what)):
        launch_environment(environ)


def test_ranks_that_are_started_again() -> None:
    assert (min_ranks(TORCHRUN), restarts(TORCHRUN)) == (None, 0)
    told = TORCHRUN | {"MCR_MIN_RANKS": "8", "MCR_RESTARTS": "2"}
    assert (min_ranks(told), restarts(told)) == (8, 2)
    with pytest.raises(LaunchError, match="MCR_MIN_RANKS=9: expected at most the number of ranks, 8"):
        min_ranks(TORCHRUN | {"MCR_MIN_RANKS": "9"})
    with pytest.raises(LaunchError, match="MCR_MIN_RANKS='0': expected a whole number from 1"):
        min_ranks(TORCHRUN | {"MCR_MIN_RANKS": "0"})
    with pytest.raises(LaunchError, match="MCR_RESTARTS='-1': expected a whole number"):
        restarts({"MCR_RESTARTS": "-1"})


def test_variables_set_for_torch_under_mpi() -> None:
    told = {"MCR_LAUNCHER": "mcr-plus", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    told |= OPENMPI | {"MASTER_PORT": "5000"}
    found = torch_environment(told)
    assert found is not None
    assert (found.rank, found.world_size, found.master_addr, found.master_port) == (1, 2, "localhost", 5000)
    for missing in ("MCR_LAUNCHER", "PMIX_RANK OMPI_COMM_WORLD_SIZE", "RANK", "WORLD_SIZE", "MASTER_PORT"):
        assert torch_environment(without(told, *missing.split())) is None
    assert torch_environment(told | {"TORCHELASTIC_RUN_ID": "a torchrun inside"}) is None


def test_socket_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    assert socket_interface({}) is None
    assert socket_interface({"GLOO_SOCKET_IFNAME": " "}) is None
    assert socket_interface({"GLOO_SOCKET_IFNAME": "eth0,eth1"}) == "eth0"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert socket_interface() == "lo"


def test_every_rule_has_a_place_of_its_own() -> None:
    rule = {"match": {"tag": "x"}, "backend": "mpi"}
    places = [r.place for r in load({"rules": [rule, rule]}).rules]
    assert places == ["configuration: rules[0]", "configuration: rules[1]"]


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch_environment().rank == 1
    assert launch_environment({}).world_size == 1


@pytest.mark.long
def test_a_configuration_without_a_codec_imports_none() -> None:
    program = "import sys, mcr_plus.config.reader as c; c.load(None); print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    codecs = {entry.partition(":")[0] for entry in registry.CODECS.values() if isinstance(entry, str)}
    assert not codecs & set(ran.stdout.split())
    assert "numba" not in ran.stdout.split()


def test_no_limit_of_its_own_for_the_first_bucket() -> None:
    rest: list[dict[str, Any]] = [{"select": {}}, {"dispatch": {}}]
    options = load({"version": 1, "pipeline": [{"fuse": {"first_bucket": None}}, *rest]}).options("fuse")
    assert isinstance(options, FuseOptions)
    assert options.first_bucket is None
    with pytest.raises(ConfigError, match="first_bucket"):
        load({"version": 1, "pipeline": [{"fuse": {"first_bucket": 0}}, *rest]})


def test_a_deadline_holds_for_rules_that_name_no_other() -> None:
    rules = [
        {"match": {"kind": "all_reduce"}, "dispatch": {"check": "every"}},
        {"match": {"kind": "broadcast"}, "dispatch": {"timeout": "7s"}},
    ]
    pipeline: list[dict[str, Any]] = [{"select": {}}, {"dispatch": {}}]
    config = load({"version": 1, "pipeline": pipeline, "rules": rules}).with_timeout(2)
    found = [config.options("dispatch"), *(config.options("dispatch", rule) for rule in config.rules)]
    assert [options.timeout for options in found if isinstance(options, DispatchOptions)] == [2, 2, 7]


@pytest.mark.parametrize(
    "stages",
    [
        [{"dispatch": {"timeout": "8s"}}],
        [{"select": {"vector_size": "1KiB"}}],
        [{"fuse": {"bucket": "1MiB"}}],
        [{"fuse": {}}, {"dispatch": {"timeout": "8s"}}],
        [{"compress": {"codec": "bf16"}}, {"select": {}}],
    ],
)
def test_select_and_dispatch_that_are_left_out_have_their_defaults(stages: list[dict[str, Any]]) -> None:
    written = {name: options for stage in stages for name, options in stage.items()}
    order = ["fuse", "compress", "select", "dispatch"]
    whole = [{name: written.get(name, {})} for name in order if name in written or order.index(name) > 1]
    assert load({"pipeline": stages}) == load({"pipeline": whole})
    assert fingerprint(load({"pipeline": stages})) == fingerprint(load({"pipeline": whole}))
