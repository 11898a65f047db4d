"""The registry by name, and additions of an installed outside package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mcr_plus import registry
from mcr_plus.backends import backend_class, preferred_backends
from mcr_plus.backends.base import NATIVE, Availability, Backend, Support, complete_channel
from mcr_plus.config.reader import loads
from mcr_plus.config.schema import default_pipeline
from mcr_plus.core.units import Range
from mcr_plus.errors import ConfigError, InvalidArgument, Unsupported
from mcr_plus.tables.interchange import import_

OWN = {
    "stages": ("compress", "dispatch", "select"),
    "codecs": ("bf16", "fp16"),
    "backends": ("gloo", "local", "mpi", "nccl"),
    "sinks": ("otlp", "prometheus"),
    "table_formats": ("nccl-csv", "oneccl", "openmpi", "ucc"),
}
MODULE = """
class Codec:
    name = "mine"

def even(value):
    if value % 2:
        raise ValueError(f"expected an even number, got {value}")
    return value
"""
OF_CAPABILITIES = """
from mcr_plus.observe.sinks import Sink, SinkOption
from mcr_plus.tables.interchange import oneccl
from mcr_plus.tables.interchange.exchange import TableFormat

class Printed(Sink):
    def __init__(self, target, rank, local):
        self.name = f"observe.printed: {target} {rank} {local}"

    def publish(self, metrics):
        print(len(metrics))

SINK = SinkOption(even, Printed)
FORMAT = TableFormat("gloo", oneccl.COLLECTIVES, oneccl.export, oneccl.import_)
"""


@pytest.fixture(autouse=True)
def _restore(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove registered names and fake packages."""
    for name, entries in registry.REGISTRIES.items():
        monkeypatch.setitem(registry.REGISTRIES, name, dict(entries))
    registry.refresh()
    yield
    registry.refresh()
    sys.modules.pop("fake_package", None)


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, entry_points: str, name: str = "fake-package"
) -> None:
    """Put a package on the path like an installer: a module, and its metadata next to it."""
    info = folder / f"{name.replace('-', '_')}-1.2.dist-info"
    info.mkdir(parents=True)
    further = OF_CAPABILITIES * ("SINK" in entry_points or "FORMAT" in entry_points)
    (folder / "fake_package.py").write_text(MODULE + further)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(entry_points)
    monkeypatch.syspath_prepend(str(folder))
    registry.refresh()


@pytest.mark.parametrize("kind", OWN)
def test_own_names(kind: str) -> None:
    assert set(OWN[kind]) <= set(registry.names(kind))
    assert list(registry.names(kind)) == sorted(registry.names(kind))


def test_own_references_name_a_module_and_an_attribute() -> None:
    for entries in registry.REGISTRIES.values():
        for reference in entries.values():
            assert isinstance(reference, str)
            module, attribute = reference.split(":")
            assert module.startswith("mcr_plus.")
            assert attribute.isidentifier()


def test_names_import_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "[mcr_plus.codecs]\nmine = fake_package:Codec\n")
    assert "mine" in registry.names("codecs")
    assert "fake_package" not in sys.modules


def test_entry_point_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "mine" not in registry.names("codecs")
    install(tmp_path, monkeypatch, "[mcr_plus.codecs]\nmine = fake_package:Codec\n")
    codec = registry.get("codecs", "mine")
    assert getattr(codec, "name", None) == "mine"
    assert registry.get("codecs", "mine") is codec
    assert "mine" not in registry.names("backends")


def test_a_sink_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_sinks = pytest.importorskip("mcr_plus.observe.sinks").open_sinks
    install(tmp_path, monkeypatch, "[mcr_plus.sinks]\nmine = fake_package:SINK\nbad = fake_package:even\n")
    options: Any = loads("version: 1\nobserve: {mine: 4}").observe
    assert isinstance(options, registry.observe_options())
    assert options.sinks == {"mine": 4}
    assert [sink.name for sink in open_sinks(options.sinks, rank=3, local=1)] == ["observe.printed: 4 3 1"]
    for written, message in {
        "mine: 3": r"^x:2: observe\.mine: expected an even number, got 3$",
        "mime: 4": r"^x:2: observe\.mime: unknown key 'mime'; known: .*mine, otlp,.* mean 'mine'\?$",
        "bad: 1": r"^x:2: observe\.bad: sink 'bad' is <function even .*; expected a SinkOption$",
    }.items():
        with pytest.raises(ConfigError, match=message):
            loads(f"version: 1\nobserve: {{{written}}}\n", "x")
    registry.refresh()
    registry.register("sinks", "ring", options)
    with pytest.raises(Unsupported, match="a sink has the name of an option under observe: ring"):
        registry.observe_options()


def test_a_format_of_tables_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcr_plus.cli")
    from command import mcr_plus

    install(
        tmp_path,
        monkeypatch,
        "[mcr_plus.table_formats]\nmine = fake_package:FORMAT\nbad = fake_package:even\n",
    )
    file = tmp_path / "ccl.env"
    file.write_text("CCL_ALLREDUCE=ring\n")
    answer = mcr_plus("table", "import", file, "--format", "mine")
    assert answer.returncode == 0, answer.stderr
    assert "backend: gloo:ring" in answer.stdout.replace('"', "")
    answer = mcr_plus("table", "import", file, "--format", "mime")
    assert answer.returncode == 2
    found = " ".join(answer.stderr.replace("│", " ").split())
    assert "--format: unknown table format 'mime'; known: bad, mine, nccl-csv," in found
    assert "did you mean 'mine'?" in found
    with pytest.raises(InvalidArgument, match=r"table format 'bad' is .* expected a TableFormat"):
        import_("bad", "")


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("fake_package:Missing", "AttributeError"),
        ("no_such_package_anywhere:Codec", "ModuleNotFoundError"),
        ("fake_package:Codec.name.absent", "AttributeError"),
    ],
)
def test_broken_entry_point_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, cause: str
) -> None:
    install(tmp_path, monkeypatch, f"[mcr_plus.codecs]\nbroken = {value}\n")
    with pytest.raises(Unsupported) as caught:
        registry.get("codecs", "broken")
    text = str(caught.value)
    for part in (f"'broken = {value}'", "mcr_plus.codecs", "fake-package 1.2", cause):
        assert part in text
    assert caught.value.__suppress_context__


def test_broken_entry_point_does_not_affect_other_entry_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path, monkeypatch, "[mcr_plus.codecs]\nbroken = nowhere_at_all:x\nmine = fake_package:Codec\n"
    )
    assert {"broken", "mine", "bf16"} <= set(registry.names("codecs"))
    assert registry.get("codecs", "mine")


def test_entry_point_under_one_of_our_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "[mcr_plus.backends]\ngloo = fake_package:Codec\n")
    with pytest.raises(Unsupported, match=r"fake-package 1\.2.*taken"):
        registry.names("backends")


def test_two_packages_with_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "a", monkeypatch, "[mcr_plus.codecs]\nmine = fake_package:Codec\n", "package-a")
    install(tmp_path / "b", monkeypatch, "[mcr_plus.codecs]\nmine = fake_package:Other\n", "package-b")
    with pytest.raises(Unsupported, match="same name") as caught:
        registry.get("codecs", "mine")
    assert "package-a" in str(caught.value)
    assert "package-b" in str(caught.value)


def test_unknown_name_and_kind() -> None:
    with pytest.raises(
        Unsupported,
        match=r"unknown backend 'glou'; known: .*gloo, local, mpi, msccl, nccl; did you mean 'gloo'\?$",
    ):
        registry.get("backends", "glou")
    with pytest.raises(Unsupported, match=r"unknown registry 'colours'; known: stages, codecs, backends"):
        registry.names("colours")


def test_register() -> None:
    thing = object()
    registry.register("codecs", "thing", thing)
    registry.register("codecs", "thing", thing)
    assert registry.get("codecs", "thing") is thing
    assert "thing" in registry.names("codecs")
    with pytest.raises(Unsupported, match="'thing' is taken"):
        registry.register("codecs", "thing", object())
    assert registry.get("codecs", "thing") is thing


def test_alias_of_a_built_in_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry.stored_name("backends", "shm") == "msccl"
    assert registry.stored_name("codecs", "shm") == "shm"
    assert registry.get("backends", "shm") is registry.get("backends", "msccl")
    assert "shm" not in registry.names("backends")
    with pytest.raises(Unsupported, match="'shm' is taken"):
        registry.register("backends", "shm", object())
    install(tmp_path, monkeypatch, "[mcr_plus.backends]\nshm = fake_package:Codec\n")
    with pytest.raises(Unsupported, match=r"entry point 'shm = fake_package:Codec' .* has a name that"):
        registry.names("backends")


def test_register_a_reference_and_its_target() -> None:
    registry.register("codecs", "path", "pathlib:Path")
    assert registry.get("codecs", "path") is Path
    registry.register("codecs", "path", Path)


def test_register_the_object_of_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "[mcr_plus.codecs]\nmine = fake_package:Codec\n")
    registry.register("codecs", "mine", registry.get("codecs", "mine"))
    with pytest.raises(Unsupported, match="'mine' is taken"):
        registry.register("codecs", "mine", object())
    registry.refresh()
    assert "mine" in registry.names("codecs")


def test_reference_that_cannot_be_imported() -> None:
    registry.register("codecs", "gone", "no_such_package_anywhere:x")
    with pytest.raises(Unsupported, match=r"codec 'gone' \(no_such_package_anywhere:x\) cannot be loaded"):
        registry.get("codecs", "gone")


class PlainBackend:
    """A backend without our base class, and with few of the optional members."""

    name = "plain"
    on_stream = False
    spins = 1
    rings = True

    def __init__(self, world: object) -> None:
        self.world = world

    @classmethod
    def availability(cls) -> Availability:
        return Availability(True, "2")

    @classmethod
    def supports(cls, signature: object) -> Support:
        return NATIVE

    def open(self, group: object) -> object:
        return PlainChannel()

    def progress(self) -> None:
        pass

    def close(self, clean: bool) -> None:
        pass


class PlainChannel:
    __slots__ = ("released",)

    def bind(self, signature: object) -> str:
        return f"bound {signature}"

    def close(self) -> None:
        raise AssertionError("not closed here")

    def release(self) -> None:
        self.released = True


@pytest.mark.parametrize(
    ("situation", "order"),
    [
        ("cpu", ["msccl", "mpi", "gloo", "nccl", "local"]),
        ("between_hosts", ["gloo", "mpi", "nccl", "msccl", "local"]),
        ("cuda", ["nccl", "mpi", "gloo", "msccl", "local"]),
    ],
)
def test_the_built_in_preference(situation: str, order: list[str]) -> None:
    known = [name for name in preferred_backends() if name in registry.BACKEND_ORDER]
    assert known == ["nccl", "msccl", "mpi", "gloo", "local"]
    assert sorted(known, key=lambda name: getattr(backend_class(name).preference, situation)) == order


def test_stages_that_must_be_requested() -> None:
    assert set(registry.STAGE_ORDER) - set(registry.DEFAULT_STAGES) == {"fuse"}
    assert [spec.name for spec in default_pipeline()] == ["hierarchical", "compress", "select", "dispatch"]


def test_a_backend_of_the_same_shape_gets_the_defaults() -> None:
    registry.register("backends", "plain", PlainBackend)
    kind: Any = backend_class("plain")
    backend: Any = kind("the world")
    assert {PlainBackend, Backend} <= {*type(backend).__mro__}
    assert backend.world == "the world"
    assert (backend.rings, backend.host_driven, backend.has_algorithms) == (True, False, True)
    assert backend.availability().version == "2"
    assert (
        backend.unavailable_for(None, None) == backend.unavailable_in(None) == backend.library_version() == ""
    )
    assert kind.sizes("ring") == Range(0)
    channel: Any = complete_channel(backend.open(None))
    assert channel.bind("x") == "bound x"
    assert channel.closes_alone
    assert not channel.outlives_library
    assert channel.gate(None, 0) is channel.bind_persistent(None, None, 0) is None
    inner = channel.release.__self__
    channel.release()
    assert inner.released


class FormerBackend(Backend):
    """A backend of another package that was written for earlier names of members."""

    name, on_stream, spins = "former", False, 1
    needs_polls = True

    @classmethod
    def serves(cls, world: object) -> str:
        return f"not in {world}"

    availability = supports = open = progress = close = None  # type: ignore[assignment]


def test_members_of_a_backend_under_former_names_are_used_with_a_warning() -> None:
    registry.register("backends", "former", FormerBackend)
    with pytest.warns(DeprecationWarning, match="is now") as warned:
        kind: Any = backend_class("former")
    assert sorted(str(each.message).partition(".FormerBackend.")[2] for each in warned) == [
        "needs_polls is now host_driven",
        "serves is now unavailable_in",
    ]
    assert kind.unavailable_in("this job") == "not in this job"
    assert kind.host_driven
    assert kind.unavailable_for(None, None) == ""
    assert backend_class("former") is kind
