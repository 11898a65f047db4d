"""`preset` stands for options of a codec and of the stage; cautions are about gradients only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command import mcr_plus

from mcr_plus.compression.codec import Codec
from mcr_plus.compression.options import CompressOptions
from mcr_plus.compression.policy import cautions, unusable
from mcr_plus.compression.topk import TopK
from mcr_plus.config.options import stage_options
from mcr_plus.config.reader import dump, load
from mcr_plus.errors import ConfigError

OUTER = {"codec": "topk", "preset": "outer"}
MOMENTUM = {"codec": "topk", "ratio": 0.18, "momentum_correction": True}


def read(**written: Any) -> CompressOptions:
    options = stage_options("compress", written)
    assert isinstance(options, CompressOptions)
    return options


def config(compress: dict[str, Any], *rules: dict[str, Any], **hierarchical: Any) -> Any:
    first = [{"hierarchical": hierarchical}] if hierarchical else []
    return load(
        {"pipeline": [*first, {"compress": compress}, {"select": {}}, {"dispatch": {}}], "rules": rules}
    )


def test_a_preset_is_its_options() -> None:
    for name, options in TopK.presets.items():
        assert read(codec="topk", preset=name) == read(codec="topk", **options)
    assert read(**OUTER) != read(codec="topk")


def test_options_beside_a_preset_replace_its_options() -> None:
    others = {"values": "int4", "error_feedback": {"decay": 0.5}, "audit_every": 10}
    changed = read(**OUTER, **others)
    assert changed == read(codec="topk", **{**TopK.presets["outer"], **others})
    assert read(**OUTER, error_feedback=False).feedback is None
    other = read(**OUTER, momentum_correction=True)
    assert other.feedback == "momentum_correction"
    assert other.error_feedback is None


def test_a_preset_in_a_rule_goes_before_the_options_of_the_stage() -> None:
    whole = config(
        {"codec": "topk", "ratio": 0.5, "warmup": 7}, {"match": {"tag": "a"}, "compress": {"preset": "outer"}}
    )
    options = whole.options("compress", whole.rules[0])
    assert options == read(codec="topk", **TopK.presets["outer"], warmup=7)
    assert load(dump(whole)) == whole
    other = config({"codec": "int8_block"}, {"match": {"tag": "x"}, "compress": OUTER})
    assert other.options("compress", other.rules[0]) == read(**OUTER)
    between = config({}, inter={"compress": OUTER}).options("hierarchical")
    assert between.inter.compress == read(**OUTER)


@pytest.mark.parametrize(
    ("written", "error"),
    [
        (
            {"codec": "topk", "preset": "outr"},
            r"preset: unknown preset 'outr'; known: adam, outer; did you mean 'outer'",
        ),
        ({"codec": "topk", "preset": 3}, "unknown preset 3"),
        ({"codec": "int8_block", "preset": "outer"}, "preset: codec 'int8_block' has no presets"),
        ({"preset": "outer"}, "preset: codec 'none' has no presets"),
        ({**OUTER, "ratio": 2}, "ratio"),
        ({**MOMENTUM, "warmup": 5}, "momentum_correction and warmup exclude each other"),
        ({"codec": "topk", "values": "int2"}, "values: int2 needs chunk, such as chunk: 4096"),
        ({"codec": "topk", "chunk": 10}, "chunk"),
        ({"codec": "topk", "chunk": 65537}, "chunk"),
        ({"codec": "topk", "values": "int3"}, "values"),
    ],
)
def test_mistakes(written: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read(**written)


def test_every_preset_is_valid() -> None:
    from mcr_plus import registry

    for name in registry.names("codecs"):
        codec = registry.get("codecs", name)
        assert isinstance(codec, type)
        assert issubclass(codec, Codec)
        for preset in codec.presets:
            read(codec=name, preset=preset)


def test_cautions_are_about_gradients() -> None:
    assert cautions(config({"codec": "int8_block"})) == []
    (note,) = cautions(config({"codec": "topk"}))
    assert note.startswith(
        "configuration: pipeline[0].compress: codec topk: not for gradients of every step under"
    )
    assert "mcr.local" in note
    (note,) = cautions(config(MOMENTUM))
    assert "which divide by the mean squares of gradients" in note
    adam = {"codec": "topk", "preset": "adam"}
    (note,) = cautions(config(adam))
    assert "betas=(0.5, …)" in note
    (note,) = cautions(config({**adam, "momentum_correction": True}))
    assert "betas" not in note
    (note,) = cautions(config(OUTER))
    assert "which divide" not in note
    outer = {"match": {"tag": "outer.*"}, "compress": {"codec": "topk", "preset": "outer"}}
    assert cautions(config({}, outer)) == []
    gathers = {"match": {"kind": "all_gather"}, "compress": OUTER}
    gradients = {"match": {"tag": "grad*", "bytes": ">=1MiB"}, "compress": {"codec": "powersgd"}}
    (note,) = cautions(config({}, outer, gathers, gradients))
    assert "rules[2]: codec powersgd: " in note
    (note,) = cautions(config({}, inter={"compress": {"codec": "sign1"}}))
    assert "codec sign1" in note


def test_rules_whose_codec_is_for_none_of_their_kinds_are_noted() -> None:
    delta = {"codec": "delta"}
    reduces = {"match": {"kind": ["all_reduce", "all_to_all"], "tag": "policy"}, "compress": delta}
    some = {"match": {"kind": ["all_reduce", "broadcast"], "tag": "policy"}, "compress": delta}
    others = [
        {"match": {"tag": "policy"}, "compress": delta},
        {"match": {"kind": "send"}, "compress": {"codec": "none"}},
    ]
    assert unusable(config({}, some, *others)) == []
    (note,) = unusable(config({}, some, reduces))
    assert note.startswith(
        "configuration: rules[1]: codec delta is for all_gather, all_gather_v, broadcast, "
    )
    assert note.endswith("so it is never used for all_reduce, all_to_all")


def test_validate_prints_cautions_beside_the_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "version: 1\npipeline:\n"
        "  - compress: {codec: topk, preset: outer}\n  - select: {}\n  - dispatch: {}\n"
    )
    answer = mcr_plus("validate", str(path))
    assert answer.returncode == 0
    assert f"note: {path}:3: pipeline[0].compress: codec topk: not for gradients" in answer.stderr
    assert "ratio: 0.125" in answer.stdout
    assert "preset" not in answer.stdout
    assert "note" not in answer.stdout
