"""The `mcr-plus` command: exit status, one JSON document, errors as one line."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from command import mcr_plus, mcr_plus_process

from mcr_plus.cli.measuring import backend_names
from mcr_plus.cli.output import plain_lines, print_error
from mcr_plus.cli.run import ViaChoice, choose_via, program
from mcr_plus.config.reader import load

PROGRAMS = str(Path(__file__).parents[1] / "support" / "programs.py")
GOOD = """\
version: 1
backends: [gloo]
pipeline:
  - select: {}
  - dispatch: {timeout: 30s}
"""


def json_of(*words: str) -> Any:
    answer = mcr_plus(*words)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD)
    return path


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "broken.yaml"
    path.write_text(GOOD + "speed: high\n")
    return path


def test_doctor_lists_every_backend_and_remedies_for_missing_ones() -> None:
    document = json_of("doctor", "--json")
    backends = {status["name"]: status for status in document["backends"]}
    assert {"gloo", "mpi", "nccl", "local"} <= backends.keys()
    assert backends["gloo"]["available"]
    assert all(s["reason"] and s["remedy"] for s in backends.values() if not s["available"])
    assert "operations" not in document


def test_shm_is_another_name_of_msccl() -> None:
    assert backend_names("shm,gloo,msccl,shm:ring", load({}), "--algorithms") == (
        "msccl", "gloo", "msccl:ring",
    )  # fmt: skip


def test_doctor_ops_covers_kind_times_backend() -> None:
    document = json_of("doctor", "--json", "--ops")
    rows = document["operations"]
    kinds, backends = {row["kind"] for row in rows}, {row["backend"] for row in rows}
    assert len(rows) == len(kinds) * len(backends)
    assert "all_reduce" in kinds
    assert {row["support"] for row in rows} <= {"native", "emulated", "no"}
    assert all(row["how"] for row in rows if row["support"] != "native")


def test_doctor_is_plain_text_in_a_pipe() -> None:
    answer = mcr_plus_process("doctor", "--ops")
    assert answer.returncode == 0, answer.stderr
    assert "gloo" in answer.stdout
    assert "│" not in answer.stdout
    assert "\x1b" not in answer.stdout


def test_validate_prints_a_pipeline_that_validates(config: Path, tmp_path: Path) -> None:
    answer = mcr_plus("validate", str(config))
    assert answer.returncode == 0, answer.stderr
    again = tmp_path / "again.yaml"
    again.write_text(answer.stdout)
    assert mcr_plus("validate", str(again)).stdout == answer.stdout


@pytest.mark.parametrize(
    ("before", "behind"), [(["validate"], []), (["run", "-n", "1", "--config"], [PROGRAMS, "arguments"])]
)
def test_bad_configuration_is_one_line_and_status_2(
    before: list[str], behind: list[str], broken: Path
) -> None:
    answer = mcr_plus(*before, str(broken), *behind)
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr.splitlines() == [answer.stderr.strip()]
    assert f"{broken}:6: speed: unknown key" in answer.stderr


def test_missing_configuration_is_status_2(tmp_path: Path) -> None:
    answer = mcr_plus("validate", str(tmp_path / "none.yaml"))
    assert answer.returncode == 2
    assert answer.stderr == f"mcr-plus: {tmp_path / 'none.yaml'}: cannot read: No such file or directory\n"


def test_validate_checks_tables_beside_other_mistakes(tmp_path: Path) -> None:
    (tmp_path / "foreign.txt").write_text("nothing of ours\n")
    (tmp_path / "two.yaml").write_text("version: 1\nrules: [{kind: al_reduce, bytes: 0.., backend: gloo}]\n")
    path = tmp_path / "run.yaml"
    path.write_text(
        "version: 1\n"
        "pipeline:\n"
        "  - compress: {codec: bf-16}\n"
        "  - select: {table: foreign.txt}\n"
        "  - dispatch: {}\n"
        "rules:\n"
        "  - {match: {tag: a}, select: {table: two.yaml}}\n"
        "  - {match: {tag: b}, select: {table: none.yaml}}\n"
    )
    answer = mcr_plus("validate", str(path))
    assert answer.returncode == 2
    assert f"{path}:3: pipeline[0].compress.codec: unknown codec 'bf-16'" in answer.stderr
    assert "foreign.txt" in answer.stderr
    assert "two.yaml:2: " in answer.stderr
    assert f"{path}:8: rules[1].select.table: no table file 'none.yaml'" in answer.stderr


def test_validate_reports_all_mistakes_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "version: 1\n"
        "backends: [mpi, gloo]\n"
        "speed: high\n"
        "pipeline:\n"
        "  - fuse: {bucket: -1, order: fast, buckets: 3}\n"
        "  - compress: {codec: int9}\n"
        "  - select: {online: maybe}\n"
        "  - dispatch: {timeout: soon}\n"
        "rules:\n"
        "  - match: {kind: al_reduce, tag: 5}\n"
        "    backend: nccl\n"
        "    compress: {codec: bf-16}\n"
        "  - {match: {}, dispatch: {}, fuse: {bucket: 8MB}, compress: {ratio: 0.1}}\n"
    )
    answer = mcr_plus("validate", str(path))
    assert answer.returncode == 2
    expected = [
        "3: speed: unknown key 'speed'",
        "5: pipeline[0].fuse.buckets: unknown key 'buckets'",
        "5: pipeline[0].fuse.bucket: expected a size",
        "5: pipeline[0].fuse.order: unknown value 'fast'",
        "6: pipeline[1].compress.codec: unknown codec 'int9'",
        "7: pipeline[2].select.online: expected true or false, got 'maybe'",
        "8: pipeline[3].dispatch.timeout: expected a duration",
        "10: rules[0].match.kind: unknown kind 'al_reduce'",
        "10: rules[0].match.tag: expected a string, got 5",
        "11: rules[0].backend: backend 'nccl' is not in backends",
        "12: rules[0].compress.codec: unknown codec 'bf-16'; known: bf16, ",
        "13: rules[1].match: empty match",
        "13: rules[1].fuse.bucket: wrong unit 'MB'",
    ]
    lines = answer.stderr.splitlines()
    assert len(lines) == len(expected)
    for line, beginning in zip(lines, expected, strict=True):
        assert line.startswith(f"mcr-plus: {path}:{beginning}")


def test_validate_reports_missing_files_beside_other_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "version: 1\n"
        "algorithms: [none.xml]\n"
        "pipeline:\n"
        "  - compress: {codec: bf-16}\n"
        "  - select: {table: none.yaml}\n"
        "  - dispatch: {}\n"
    )
    answer = mcr_plus("validate", str(path))
    assert answer.returncode == 2
    lines = answer.stderr.splitlines()
    expected = [
        "2: algorithms[0]: ",
        "4: pipeline[0].compress.codec: unknown codec",
        "5: pipeline[1].select.table: no table file 'none.yaml'",
    ]
    assert len(lines) == len(expected)
    for line, beginning in zip(lines, expected, strict=True):
        assert line.startswith(f"mcr-plus: {path}:{beginning}")


def test_mistakes_are_reported_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "rules:\n"
        "  - match: {kind: al_reduce}\n"
        "    backend: mpi\n"
        "  - match: {tag: 5}\n"
        "pipeline:\n"
        "  - select:\n"
        "      online: maybe\n"
        "      table: [1]\n"
        "  - dispatch: {timeout: soon}\n"
        "backends: [ncll]\n"
        "speed: high\n"
        "version: 2\n"
    )
    answer = mcr_plus("validate", str(path))
    assert answer.returncode == 2
    assert [int(line.split(":")[2]) for line in answer.stderr.splitlines()] == [2, 4, 7, 8, 9, 10, 11, 12]


def test_validate_prints_sizes_and_durations_with_units(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "version: 1\n"
        "pipeline:\n"
        "  - fuse: {bucket: 8388608, first_bucket: null}\n"
        "  - hierarchical: {min: 98304, inter: {compress: {codec: bf16, exempt: {below: 4096}}}}\n"
        "  - compress: {}\n"
        "  - select: {vector_size: 1000}\n"
        "  - dispatch: {timeout: 30}\n"
        "rules:\n"
        "  - match: {bytes: '>=1048576', ranks: '2..5'}\n"
        "    dispatch: {timeout: 0.0025}\n"
        "  - match: {bytes: 4096}\n"
        "    fuse: {memory: 3000000}\n"
    )
    answer = mcr_plus("validate", str(path))
    assert answer.returncode == 0, answer.stderr
    shown = yaml.safe_load(answer.stdout)
    fuse, hierarchical, _, select, dispatch = (next(iter(each.values())) for each in shown["pipeline"])
    assert (fuse["bucket"], fuse["first_bucket"], fuse["memory"]) == ("8MiB", None, "256MiB")
    assert hierarchical["min"] == "96KiB"
    assert hierarchical["inter"]["compress"]["exempt"]["below"] == "4KiB"
    assert (select["vector_size"], dispatch["timeout"]) == ("1000", "30s")
    assert [rule["match"]["bytes"] for rule in shown["rules"]] == ["1MiB..", "4KiB"]
    assert shown["rules"][0]["match"]["ranks"] == "2..5"
    assert shown["rules"][0]["dispatch"] == {"timeout": "0.0025s"}
    plain = json.loads(mcr_plus("validate", str(path), "--json").stdout)
    assert plain["pipeline"][0]["fuse"]["bucket"] == 8388608
    again = tmp_path / "again.yaml"
    again.write_text(answer.stdout)
    assert load(again) == load(path)


def test_validate_recognises_a_table(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(TABLE)
    answer = mcr_plus("validate", str(path))
    assert answer.returncode == 0
    assert f"{path}: a tuning table of 1 rule" in answer.stdout
    assert json_of("validate", str(path), "--json") == {"table": str(path), "rules": 1}
    path.write_text(
        "version: 1\nstrict: 1\nrules: [{kind: all, bytes: 0.., backend: gloo}, {kind: send, bytes: x}]\n"
    )
    wrong = mcr_plus("validate", str(path))
    assert wrong.returncode == 2
    assert [line.split(": ")[2] for line in wrong.stderr.splitlines()] == [
        "strict", "rules[0].kind", "rules[1].bytes", "rules[1].backend",
    ]  # fmt: skip


def test_tables_and_configurations_are_distinguished(tmp_path: Path, config: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(TABLE)
    assert "this is a tuning table" in mcr_plus("explain", "all_reduce", "8", "--config", path).stderr
    assert "this is a configuration" in mcr_plus("table", "show", config).stderr


TABLE = "version: 1\nrules: [{kind: all_reduce, bytes: 0.., backend: gloo}]\n"


@pytest.mark.parametrize(
    ("table", "error"),
    [
        (TABLE, None),
        (None, "run.yaml:2: pipeline[0].select.table: no table file 'table.yaml'"),
        (TABLE.replace("gloo", "glue"), "table.yaml:2: rules[0].backend: unknown backend 'glue'"),
    ],
    ids=["good", "missing", "bad"],
)
def test_validate_reads_the_tables(tmp_path: Path, table: str | None, error: str | None) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("version: 1\npipeline: [{select: {table: table.yaml}}, {dispatch: {}}]\n")
    if table is not None:
        (tmp_path / "table.yaml").write_text(table)
    answer = mcr_plus("validate", str(path))
    assert answer.returncode == (2 if error else 0)
    assert error is None or answer.stderr.startswith(f"mcr-plus: {tmp_path}/{error}")


def test_validate_compares_a_table_with_the_backends(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "version: 1\nbackends: [mpi]\npipeline: [{select: {table: table.yaml}}, {dispatch: {}}]\n"
    )
    (tmp_path / "table.yaml").write_text(f"{TABLE[:-2]}, {{kind: broadcast, bytes: 0.., backend: gloo}}]\n")
    for words in (["validate", str(path)], ["bench", "-n", "2", "--config", str(path)]):
        answer = mcr_plus(*words)
        assert answer.returncode == 2
        assert answer.stderr == (
            f"mcr-plus: {tmp_path}/table.yaml:2: backend 'gloo' is not in the configuration's backends "
            "(mpi); add it there, or tune with --backends (1 more rules name it)\n"
        )


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["run"],
        ["run", "x.py"],
        ["run", "-n", "0", PROGRAMS],
        ["run", "-n", "two", PROGRAMS],
        ["run", "-n", "2", "no_such_script.py"],
        ["run", "-n", "2", "--via", "pigeon", PROGRAMS],
        ["run", "-n", "2", "--min-ranks", "0", PROGRAMS],
        ["run", "-n", "2", "--min-ranks", "1", "--restart-failed", "-1", PROGRAMS],
        ["validate"],
        ["explain", "all_reduce"],
        ["explain", "all_redcue", "8"],
        ["explain", "all_reduce", "8 parsecs"],
        ["explain", "all_reduce", "8", "--dtype", "float33"],
        ["explain", "all_reduce", "8", "--ranks", "0"],
        ["explain", "all_reduce", "8", "--nodes", "0"],
        ["explain", "all_reduce", "8", "--nodes", "3"],
        ["explain", "all_reduce", "7"],
        ["doctor", "--nonsense"],
    ],
    ids=" ".join,
)
def test_bad_usage_is_status_2(words: list[str]) -> None:
    answer = mcr_plus(*words)
    assert answer.returncode == 2
    assert "Traceback" not in answer.stderr


def test_explain_json_is_one_document(config: Path) -> None:
    answer = mcr_plus_process("explain", "all_reduce", "64KiB", "--config", str(config), "--json")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["bytes"] == 64 * 1024


def test_explain_takes_the_spelling_of_calls(config: Path) -> None:
    words = ["explain", "all_to_all_single", "64KiB", "--config", str(config), "--json"]
    assert json_of(*words)["kind"] == "all_to_all"


def test_explain_obeys_the_configuration(config: Path) -> None:
    words = ["explain", "all_reduce", "64KiB", "--config", str(config), "--json"]
    document = json_of(*words, "--ranks", "4", "--nodes", "2", "--async", "--tag", "mlp")
    assert document["backends"] == ["gloo"]
    assert (document["ranks"], document["nodes"]) == (4, 2)
    assert (document["async_op"], document["tag"]) == (True, "mlp")


def test_explain_reads_for_people() -> None:
    answer = mcr_plus("explain", "all_reduce", "64KiB")
    assert answer.returncode == 0, answer.stderr
    first, *_, last = answer.stdout.splitlines()
    assert first == "all_reduce 64 KiB float32, 2 ranks on 1 host"
    assert last.startswith("=> ")


@pytest.mark.long
def test_run_gives_the_configuration_to_the_ranks(config: Path) -> None:
    words = ["run", "-n", "1", "--config", config.name, PROGRAMS, "environment", "MCR_CONFIG", "MCR_LAUNCHER"]
    answer = mcr_plus_process(*words, cwd=config.parent)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == f"MCR_CONFIG={config.resolve()}\nMCR_LAUNCHER=mcr-plus\n"


@pytest.mark.parametrize(
    ("option", "meant"), [("--conf", "--config"), ("--vai", "--via"), ("--rank=2", "--ranks"), ("-x", "")]
)
def test_run_refuses_unknown_options_before_the_script(option: str, meant: str) -> None:
    answer = mcr_plus("run", "-n", "1", option, PROGRAMS, "arguments")
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert f"No such option: {option.partition('=')[0]}" in answer.stderr
    assert meant in answer.stderr.partition("No such option: ")[2].removeprefix(option.partition("=")[0])
    assert "no such file" not in answer.stderr


def test_options_after_the_script_are_passed_to_it() -> None:
    answer = mcr_plus_process("run", "-n", "1", PROGRAMS, "arguments", "--conf", "x", "-n", "3", "--", "-x")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == "('--conf', 'x', '-n', '3', '--', '-x')\n"


def test_run_tags_lines() -> None:
    answer = mcr_plus_process("run", "-n", "2", "--tag-output", PROGRAMS, "arguments", "a")
    assert sorted(answer.stdout.splitlines()) == ["[0] ('a',)", "[1] ('a',)"]


def test_run_failure_is_status_1_for_any_exit_of_the_rank() -> None:
    answer = mcr_plus_process("run", "-n", "2", PROGRAMS, "no such program")
    assert answer.returncode == 1
    assert answer.stderr.splitlines()[-1].strip() == "KeyError: 'no such program'"


def test_run_of_a_module() -> None:
    answer = mcr_plus_process("run", "-n", "1", "-m", "platform")
    assert answer.returncode == 0, answer.stderr
    assert "Linux" in answer.stdout


def test_auto_launcher_is_mpi_if_configured_and_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcr_plus.cli.run.mpi_usable", lambda: True)
    assert choose_via(ViaChoice.auto, None) == "mpi"
    assert choose_via(ViaChoice.auto, ("gloo", "mpi")) == "mpi"
    assert choose_via(ViaChoice.auto, ("gloo",)) == "torch"
    assert choose_via(ViaChoice.mpi, ("gloo",)) == "mpi"
    assert choose_via(ViaChoice.torch, None) == "torch"
    monkeypatch.setattr("mcr_plus.cli.run.mpi_usable", lambda: False)
    assert choose_via(ViaChoice.auto, None) == "torch"


@pytest.mark.short(
    "--min-ranks 0", "--min-ranks 3", "--min-ranks 1 --restart", "--restart", "--min-ranks 1 --via"
)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--min-ranks 0", "--min-ranks: 0: expected 1 to 2 (-n)"),
        ("--min-ranks 3", "--min-ranks: 3: expected 1 to 2 (-n)"),
        ("--min-ranks 1 --restart-failed -1", "--restart-failed: -1: expected 0 or more"),
        (
            "--restart-failed 3",
            "3: needs --min-ranks, the fewest ranks for the job to continue: 1 to 2",
        ),
        ("--min-ranks 1 --via mpi", "--via: mpi: MPI ends all ranks when one dies"),
        ("--min-ranks 1 --config CONFIG", "leave it out: backends: [gloo]"),
    ],
)
def test_bad_options_about_failed_ranks(tmp_path: Path, words: str, told: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("version: 1\nbackends: [gloo, mpi]\n")
    options = [str(path) if word == "CONFIG" else word for word in words.split()]
    answer = mcr_plus_process("run", "-n", "2", *options, PROGRAMS, "arguments")
    assert answer.returncode == 2
    assert told in " ".join(answer.stderr.replace("│", " ").replace("'", "").split())


def test_program_of_a_script(tmp_path: Path) -> None:
    script, tool, text = tmp_path / "a.py", tmp_path / "tool", tmp_path / "text"
    for path in (script, tool, text):
        path.touch(mode=0o700 if path == tool else 0o600)
    assert program(str(script)) == [sys.executable, str(script)]
    assert program(str(tool)) == [str(tool)]
    assert program(str(text)) == [sys.executable, str(text)]


def test_plain_table_is_aligned() -> None:
    assert plain_lines("title", ("a", "bb"), [("long", "x")]) == ["title", "a     bb", "long  x", ""]


def test_shells_can_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_MCR_PLUS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "mcr-plus va")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert mcr_plus("").stdout.split() == ["validate"]
    monkeypatch.delenv("_MCR_PLUS_COMPLETE")
    assert "--install-completion" in mcr_plus("--help").stdout


def test_colour_is_for_terminals_and_can_be_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(**variables: str) -> str:
        terminal = io.StringIO()
        terminal.isatty = lambda: True  # type: ignore[method-assign]
        with monkeypatch.context() as patch, redirect_stderr(terminal):
            patch.setenv("TERM", "xterm")
            patch.delenv("NO_COLOR", raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            print_error("wrong")
        return terminal.getvalue()

    assert shown().startswith("\x1b[1;31mmcr-plus:")
    assert "31m" not in shown(NO_COLOR="1")
    answer = mcr_plus("validate", "missing.yaml")
    assert answer.stderr.startswith("mcr-plus: missing.yaml")


def test_trace_merge(tmp_path: Path) -> None:
    for rank, host, epoch, start in ((0, "a", 5e6, 100.0), (1, "b", 7e6, 90.0), (2, "a", 5e6 + 10, 101.0)):
        events = [
            {"ph": "M", "name": "process_name", "pid": rank},
            {"ph": "b", "id": str(rank), "pid": rank, "ts": start},
        ]
        about = {"rank": rank, "host": host, "epoch_us": epoch}
        (tmp_path / f"trace{rank}.json").write_text(json.dumps({"traceEvents": events, "otherData": about}))
    files = [str(tmp_path / f"trace{rank}.json") for rank in (2, 1, 0)]
    output = tmp_path / "all.json"
    answer = mcr_plus("trace", "merge", *files, "-o", str(output))
    assert (answer.returncode, answer.stdout) == (0, "")
    assert answer.stderr == (
        f"{output}: 6 events of 3 ranks\nclock of b: shifted by 2.000000 s, error unknown (by time of day)\n"
    )
    times = {
        event["pid"]: event["ts"] for event in json.loads(output.read_text())["traceEvents"] if "ts" in event
    }
    assert times == {0: 100.0, 1: 90.0 + 2e6, 2: 101.0}  # of one host: one clock

    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "text").write_text("hello")
    refused = {
        (files[0], files[0]): "rank 2 is in",
        (files[0], str(tmp_path / "other.json")): "expected a trace that log.save() or",
        (str(tmp_path / "text"),): "not JSON",
        (str(tmp_path / "missing"),): "cannot read: No such file",
    }
    for words, what in refused.items():
        answer = mcr_plus("trace", "merge", *words, "-o", str(output))
        assert answer.returncode == 2
        assert what in answer.stderr


ABOUT = {"rank": 0, "host": "a", "epoch_us": 1.0}


@pytest.mark.parametrize(
    ("document", "what"),
    [
        (["hunter2"], ": expected a trace"),
        ({"password": "hunter2"}, ": expected a trace"),
        ({"traceEvents": [], "otherData": {**ABOUT, "rank": "hunter2"}}, ": otherData.rank: "),
        ({"traceEvents": [], "otherData": {**ABOUT, "rank": True}}, ": otherData.rank: "),
        ({"traceEvents": [], "otherData": {**ABOUT, "epoch_us": 10**400}}, ": otherData.epoch_us: "),
        ({"traceEvents": [{}, 7], "otherData": ABOUT}, ": traceEvents[1]: "),
        ({"traceEvents": [{"ts": "hunter2"}], "otherData": ABOUT}, ": traceEvents[0]: "),
        ({"traceEvents": [{"ts": 10**400}], "otherData": ABOUT}, ": traceEvents[0]: "),
        ({"traceEvents": [{"ts": float("nan")}], "otherData": ABOUT}, ": traceEvents[0]: "),
    ],
)
def test_errors_do_not_quote_files_other_than_traces(tmp_path: Path, document: object, what: str) -> None:
    path, output = tmp_path / "other.json", tmp_path / "all.json"
    path.write_text(json.dumps(document))
    answer = mcr_plus("trace", "merge", str(path), "-o", str(output))
    assert answer.returncode == 2
    assert answer.stderr.startswith(f"mcr-plus: {path}{what}")
    assert len(answer.stderr.splitlines()) == 1
    assert "hunter2" not in answer.stderr
    assert not output.exists()


def test_a_trace_that_is_nested_too_deep(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 200_000)
    answer = mcr_plus("trace", "merge", str(tmp_path / "deep.json"), "-o", str(tmp_path / "all.json"))
    assert (answer.returncode, len(answer.stderr.splitlines())) == (2, 1)


def test_traces_are_regular_files(tmp_path: Path) -> None:
    """The FIFO has no writer and no reader: commands that open it would wait for ever."""
    trace, pipe = tmp_path / "trace.json", tmp_path / "pipe"
    trace.write_text(json.dumps({"traceEvents": [], "otherData": ABOUT}))
    os.mkfifo(pipe)
    for words in ((pipe, "-o", tmp_path / "all.json"), (trace, "-o", pipe)):
        done = mcr_plus_process("trace", "merge", *map(str, words))
        assert done.returncode == 2
        assert f"{pipe}: cannot " in done.stderr
        assert "not a regular file" in done.stderr


def test_links_to_programs_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python finds its virtual environment by such a link."""
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert program("python") == program("./python") == [str(link)]
    with pytest.raises(typer.BadParameter, match="not a file"):
        program(str(tmp_path))


def test_version_and_help() -> None:
    assert mcr_plus("--version").stdout.startswith("mcr-plus ")
    assert mcr_plus("--help").returncode == 0


def test_installed_command_is_the_module() -> None:
    command = Path(sys.executable).with_name("mcr-plus")
    if not command.exists():
        pytest.skip("not installed as a command")
    answer = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert answer.stdout == mcr_plus("--version").stdout


@pytest.mark.parametrize("words", [(), ("run",), ("table",), ("table", "show"), ("doctor",)])
def test_short_help_is_help(words: tuple[str, ...]) -> None:
    short, long = mcr_plus(*words, "-h"), mcr_plus(*words, "--help")
    assert (short.returncode, short.stdout) == (0, long.stdout)
    assert "Usage" in short.stdout


def test_the_package_runs_as_the_command() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "mcr_plus", "--version"], capture_output=True, text=True, check=True
    )
    assert answer.stdout.startswith("mcr-plus ")


@pytest.mark.parametrize("option", ["--hosts", "--hostfile", "--nnodes", "-H", "--machinefile"])
def test_options_for_several_hosts_name_the_launchers_for_them(option: str) -> None:
    answer = mcr_plus("run", option, "2", "-n", "2", PROGRAMS)
    assert answer.returncode == 2
    assert all(word in answer.stderr for word in ("this host", "mpirun", "srun", "torchrun"))


@pytest.mark.parametrize("option", ["-np", "--np", "--nproc_per_node", "--nproc-per-node"])
def test_other_options_for_the_number_of_ranks_name_ours(option: str) -> None:
    answer = mcr_plus("run", option, "2", PROGRAMS)
    assert answer.returncode == 2
    assert "by -n 2" in answer.stderr
