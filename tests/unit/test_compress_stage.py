"""The compress stage: the codec and options of an operation, and refused settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from pydantic import BaseModel

from mcr_plus import registry
from mcr_plus.compression.codec import PayloadCodec, Traits
from mcr_plus.compression.options import CompressOptions
from mcr_plus.compression.stage import CompressStage
from mcr_plus.config.options import stage_options
from mcr_plus.config.reader import load
from mcr_plus.config.schema import Config
from mcr_plus.core.group import Group
from mcr_plus.core.message import Codec, Message, Signature
from mcr_plus.errors import InvalidArgument, Unsupported
from mcr_plus.pipeline.stage import Context, Issue
from mcr_plus.pipeline.treatment import Treatment
from mcr_plus.rendezvous.world import World


class ScaleOptions(BaseModel):
    model_config = {"extra": "forbid", "frozen": True}
    by: int = 2


class Scale(PayloadCodec):
    """Values times a number, as float16."""

    Options = ScaleOptions
    name = "scale"
    wire_dtype = torch.float16
    traits = Traits(additive=True, elementwise=True, dtypes=(torch.float32,))
    options: ScaleOptions

    def wire_numel(self, numel: int) -> int:
        return numel

    def _encode(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        wire.copy_(values * self.options.by)

    def _decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(wire / self.options.by)

    def _accumulate(self, wire: torch.Tensor, total: torch.Tensor, scale: float) -> None:
        total += wire / self.options.by * scale


class Narrow(Scale):
    """A codec that takes nothing."""

    name = "narrow"
    traits = Traits(additive=True, elementwise=True, dtypes=())


class Rest:
    """The rest of a pipeline: keeps the operations that it gets."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.signatures: list[Signature] = []
        self.messages: list[Message] = []
        self.after: list[Callable[[], None]] = []
        self.issue = Issue(self._start)

    def __call__(self, signature: Signature) -> Issue:
        self.signatures.append(signature)
        return self.issue

    def through(self, pipeline: object, signature: Signature) -> Any:
        return self(signature)

    def moving(self, signature: Signature, instead: object) -> Any:
        return self(signature)

    def treatment(self, signature: Signature) -> Treatment:
        return Treatment(signature.compress)

    def note(self, text: str, details: object = None) -> None:
        self.notes.append(text)

    def _start(self, message: Message) -> Any:
        self.messages.append(message)
        return self

    def then(self, function: Callable[[], None]) -> Rest:
        self.after.append(function)
        return self


@pytest.fixture(autouse=True)
def _scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.REGISTRIES, "codecs", {**registry.CODECS, "scale": Scale, "narrow": Narrow})


CONTEXT = Context(Config(), World(0, 2, ("localhost",) * 2, 300.0), Group("world", (0, 1), 0), {})


def bind(
    compress: Codec | bool | None = None, options: dict[str, Any] | None = None, ranks: int = 2
) -> tuple[Issue, Rest]:
    stage = CompressStage(cast("CompressOptions", stage_options("compress", options or {})), CONTEXT)
    rest = Rest()
    signature = Signature(
        "all_reduce", torch.float32, (3,), 12, "world", ranks, reduce_op="SUM", compress=compress
    )
    return stage.bind(signature, rest), rest


def wire(issue: Issue, rest: Rest) -> list[float]:
    """Return the payload of 1, 2, 3; check that decoding gives them back."""
    tensor = torch.tensor([1.0, 2.0, 3.0])
    issue(Message(Signature("all_reduce", tensor.dtype, (3,), 12, "world", 2), (tensor,), (tensor,)))
    (message,) = rest.messages
    assert message.prepare is not None
    message.prepare()
    values: list[float] = message.inputs[0].tolist()
    tensor.zero_()
    for function in rest.after:
        function()
    assert tensor.tolist() == [1, 2, 3]
    return values


@pytest.mark.parametrize(
    ("compress", "options", "expected"),
    [
        (None, {"codec": "scale"}, [2, 4, 6]),
        (None, {"codec": "scale", "by": 5}, [5, 10, 15]),
        ("scale", {}, [2, 4, 6]),
        ("scale", {"codec": "scale", "by": 5}, [2, 4, 6]),
        ((("by", 3), ("codec", "scale")), {}, [3, 6, 9]),
        ((("codec", "bf16"),), {"codec": "scale"}, [1, 2, 3]),
    ],
)
def test_a_codec_gets_its_options(
    compress: Codec | None, options: dict[str, Any], expected: list[float]
) -> None:
    assert wire(*bind(compress, options)) == expected


@pytest.mark.parametrize("compress", [False, "none", (("codec", "none"),)])
def test_a_call_can_disable_compression(compress: Codec | bool) -> None:
    issue, rest = bind(compress, {"codec": "scale"})
    assert issue == rest.issue
    assert rest.notes == ["off for this operation"]
    assert rest.signatures[0].compress is None


def test_one_rank_sends_nothing() -> None:
    issue, rest = bind(None, {"codec": "scale"}, ranks=1)
    assert issue == rest.issue
    assert rest.notes == ["codec scale not used: a group of one rank sends nothing"]


@pytest.mark.parametrize(
    ("compress", "what"),
    [
        ("int9", "all_reduce: compress.codec: unknown codec 'int9'; known: bf16, delta, "),
        (
            (("codec", "scale"), ("to", 3)),
            "all_reduce: compress.to: unknown key 'to'; known: audit_every, by, codec, ",
        ),
        ((("by", "x"), ("codec", "scale")), "all_reduce: compress.by: expected a whole number, got 'x'"),
        (
            (("by", 3), ("codec", "bf16")),
            "all_reduce: compress.by: unknown key 'by'; known: audit_every, codec, ",
        ),
        ((("by", 3),), "no codec; expected the key 'codec'"),
        ((), "no codec; expected the key 'codec'"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_options_of_a_call_are_checked(compress: Codec, what: str, ranks: int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        bind(compress, ranks=ranks)
    assert what in str(caught.value)


def test_operations_that_a_codec_cannot_take() -> None:
    with pytest.raises(Unsupported, match="codec narrow takes"):
        bind("narrow")
    assert bind(None, {"codec": "narrow"})[1].notes == [
        "codec narrow not used: codec narrow takes , not float32"
    ]


def test_a_rule_gives_a_codec_other_options() -> None:
    config = load(
        {
            "pipeline": [{"compress": {"codec": "scale", "by": 4}}, {"select": {}}, {"dispatch": {}}],
            "rules": [{"match": {"tag": "x"}, "compress": {"by": 7}}],
        }
    )
    for rule, expected in ((None, 4), (config.rules[0], 7)):
        options = config.options("compress", rule)
        assert isinstance(options, CompressOptions)
        rest = Rest()
        signature = Signature("broadcast", torch.float32, (3,), 12, "world", 2, root=0)
        assert wire(CompressStage(options, CONTEXT).bind(signature, rest), rest)[0] == expected
