"""Mutation testing: breaks the library in some sixty places, one at a time, and lists which tests fail.

    python tests/support/mutate.py [NAME…] [--tier all] [--all-tests]

Every mutation is one plausible mistake: a wrong comparison, a lost term, an omitted check. It is applied to a
copy of the working tree, in which its named tests (`--all-tests`: all tests) of `make test` (`--tier all`: of
`make test-all`) run until the first failure. A surviving mutation is a gap in the tests. After a change to
the way tests run, the same mutations must still be found. Prints a table; ends with status 1 if one survives.
"""

# ruff: noqa: E501 - a mutation is a line of its own

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 900
_TIERS = {"test": "not slow and not long", "all": "not slow"}


@dataclass(frozen=True)
class Mutation:
    """Replacement of `old` by `new` in `path`, a file of the library; one of `tests` must fail."""

    name: str
    path: str
    old: str
    new: str
    tests: str

    def apply(self, root: Path) -> None:
        """Change the file. Raises `LookupError` unless it has the text exactly once."""
        file = root / "mcr_plus" / self.path
        text = file.read_text()
        if text.count(self.old) != 1:
            raise LookupError(f"{self.name}: {self.path} has {text.count(self.old)} times {self.old!r}")
        file.write_text(text.replace(self.old, self.new))


MUTATIONS = (
    # core
    Mutation("size unit", "core/units.py", 'int(number) * SIZE_UNITS[unit or "B"]', 'int(number) * SIZE_UNITS["B"]', "test_config test_table"),
    Mutation("bus factor", "core/kinds.py", "bus_factor=lambda n: 2 * _by_links(n)", "bus_factor=_by_links", "test_kinds test_cost test_record"),
    Mutation("digest of a signature", "core/message.py", "repr(tuple(self)).encode()", "repr(tuple(self)[:3]).encode()", "test_mismatch test_message"),
    Mutation("flows of a gather", "core/message.py", "[mine if peer == signature.root else 0 for peer in range(size)]\n        elif signature.kind == \"reduce_scatter_v\"", "[mine] * size\n        elif signature.kind == \"reduce_scatter_v\"", "test_mismatch test_message"),
    Mutation("a second waiter returns early", "core/work.py", "while not self._is_done and self._finisher != threading.get_ident():", "while False:", "test_coalesce test_waiting test_groups"),
    # communicator
    Mutation("overlapping output and input", "communicator/prepared.py", "if to < since + read and since < to + written and since - to != shift:", "if False:", "test_calls test_in_place"),
    Mutation("a block elsewhere in the other buffer", "communicator/prepared.py", "since < to + written and since - to != shift", "since < to + written and shift is None", "test_in_place"),
    Mutation("split sizes that do not sum", "communicator/calls.py", "if len(counts) != group.size or sum(counts) != rows:", "if len(counts) != group.size:", "test_arguments"),
    Mutation("unknown keyword", "communicator/communicator.py", "if isinstance(compress, Mapping) or not options.keys() <= _OPTIONS:", "if isinstance(compress, Mapping):", "test_calls test_arguments"),
    Mutation("elements that share memory", "communicator/tensors.py", "if any(size > 1 and stride == 0", "if any(size > 1 and stride < 0", "test_arguments"),
    # fusion
    Mutation("buffer too small", "fusion/buffers.py", "if buffer.numel >= numel:", "if buffer.numel >= numel // 2:", "test_fuse test_coalesce test_bucket"),
    Mutation("bucket limit", "fusion/stage.py", "if signature.nbytes >= self._options.bucket:", "if signature.nbytes > self._options.bucket:", "test_fuse test_bucket"),
    # compression
    Mutation("scale of int8 blocks", "kernels/int8_block.py", "_STEP: Final = np.float32(1 / 127)", "_STEP: Final = np.float32(1 / 120)", "test_kernels_blocks test_codecs"),
    Mutation("digits of top-k", "kernels/topk.py", "_DIGITS: Final = ((20, 11), (9, 11), (0, 9))", "_DIGITS: Final = ((20, 11), (9, 11), (1, 8))", "test_kernels_topk test_topk"),
    Mutation("residual not kept", "compression/codec.py", "self.decode_accumulate(wire[:written], rest, -1.0)", "self.decode_accumulate(wire[:written], rest, 1.0)", "test_feedback test_compressed"),
    Mutation("EF21 difference", "compression/ef21.py", "(values - mine).mul_(scale)", "(values + mine).mul_(scale)", "test_feedback"),
    Mutation("mean of compressed sums", "compression/schemes.py", '1 / signature.ranks if signature.reduce_op == "AVG" else 1.0', "1.0", "test_compressed"),
    Mutation("messages of variable rate", "compression/policy.py", "if signature.is_p2p and not (traits.fixed_rate or traits.keeps_received):", "if False:", "test_compress_stage test_compressed"),
    Mutation("mean in int8 over gloo", "backends/gloo/operations.py", 'if op == "AVG" else None', "if False else None", "test_conformance"),
    # backends
    Mutation("root of gloo", "backends/gloo/operations.py", "BroadcastOptions(), rootRank=root", "BroadcastOptions(), rootRank=0", "test_conformance"),
    Mutation("largest count of MPI", "backends/mpi/backend.py", "_MAX_COUNT: Final = 2**31 - 1", "_MAX_COUNT: Final = 2**40", "test_explain test_conformance test_arguments"),
    Mutation("algorithms beside gloo", "backends/gloo/backend.py", "if signature.algorithm is not None:", "if False:", "test_explain test_config test_compress_stage"),
    # dispatch
    Mutation("a later post in the ring", "board/base.py", "<= TAG_MASK >> 1", "<= TAG_MASK", "test_board"),
    Mutation("turn of compiling", "board/base.py", "return turn + 1 + ((turn + 1) % 2 != begins)", "return turn + 1", "test_compiling test_board"),
    Mutation("a second thread of a group", "engine/group_state.py", "if self.changes_threads or not self._thread.is_alive():", "if True:", "test_mismatch"),
    Mutation("order across lanes", "engine/engine.py", "if after is None:\n            return True", "if True:\n            return True", "test_hierarchical test_compressed test_progress"),
    # pipeline
    Mutation("several operations in flight", "pipeline/pipeline.py", "return changed if same else changed.replace(async_op=True)", "return changed", "test_pipeline test_seams"),
    Mutation("bytes that a pool lends", "core/buffers.py", "                self.nbytes -= size\n", "", "test_buffers test_compressed"),
    Mutation("values of an encoded operation", "pipeline/dispatch.py", "signature.encoding is not None and signature.kind in VECTOR", "False", "test_pipeline test_mismatch"),
    # selection, tables, tuning
    Mutation("margin of a trial", "trials/trial.py", "MARGIN: Final = 0.05", "MARGIN: Final = -0.5", "test_online test_never_slower"),
    Mutation("bytes per rank", "tables/table.py", "return self.nbytes // self.ranks", "return self.nbytes * self.ranks", "test_table test_table_editing"),
    Mutation("rules by number of nodes", "tables/table.py", "_within(self.nodes, query.nodes)", "True", "test_table"),
    Mutation("figures that make no sense", "tuning/build_table.py", "if candidate not in odd.get(size, ())", "if True", "test_tuning"),
    # hierarchy
    Mutation("rest of uneven parts", "hierarchy/decompose.py", "rest = self.numel % self.nodes.size", "rest = 0", "test_hierarchical"),
    # msccl
    Mutation("verifier's sums", "msccl/verifier.py", "if value == ChunkSum(expected):", "if True:", "test_msccl_verifier"),
    Mutation("layout in place", "msccl/postconditions.py", "0 if length == whole else rank * part", "0", "test_msccl_verifier test_msccl_generators test_shm_interpreter"),
    # plan
    Mutation("bound of gradients that are joined", "bucketing/search.py", "_cheapest(np.minimum.accumulate(price, axis=0))", "_cheapest(price)", "test_plan test_advise"),
    Mutation("waits for other operations", "bucketing/buckets.py", "elif isinstance(each, WaitEvent) and each.id in carrying:", "elif isinstance(each, WaitEvent):", "test_plan test_advise"),
    Mutation("gradients of two dtypes", "bucketing/buckets.py", "(likes[name], tuple(sorted(of_role.items())))", '("", tuple(sorted(of_role.items())))', "test_advise test_planning"),
    Mutation("ends of a message", "bucketing/programs.py", '"send" if event.kind == "recv" else event.kind', "event.kind", "test_network test_advise"),
    Mutation("share above one", "bucketing/scaling.py", "min(exposed[size] / whole[size], 1.0)", "exposed[size] / whole[size]", "test_plan test_scaling"),
    Mutation("waits of the step before", "bucketing/capture.py", "known = number if is_known else -1", "known = number", "test_captured_waits test_capture"),
    Mutation("tables of a plan", "bucketing/saved.py", "if None not in (tables, self.tables) and tables != self.tables:", "if None not in (tables, self.tables) and len(tables) != len(self.tables):", "test_plan test_given_plan"),
    # layout
    Mutation("holder on the own node", "layout/messages.py", "if len(near):", "if False:", "test_layouts test_cli_layout test_dtensor_volume"),
    Mutation("slices between nodes", "layout/program.py", "few = have.counts[region] if nodes is None else np.ones(len(region), np.int64)", "few = have.counts[region]", "test_layouts test_cli_layout"),
    Mutation("bits of replicas", "layout/native.py", "return source.addend_count == 2 and (", "return source.addend_count >= 2 and (", "test_layout_collectives test_redistribute"),
    Mutation("order of the sums of copies", "layout/halo.py", "if apart and len(others) == len(found) - 1:", "if len(others) == len(found) - 1:", "test_halo test_spatial test_layout_autograd"),
    Mutation("buffers of rounds in flight", "layout/run.py", "if index >= slots:", "if False:", "test_redistribute"),
    Mutation("waves wait", "layout/run.py", "self._issue(1, second[wave - 1], wave - 1, [sent[wave - 1]])", "self._issue(1, second[wave - 1], wave - 1, [])", "test_redistribute"),
    Mutation("root of a broadcast", "layout/native.py", "for rank in group if len(source.pieces(rank)))", "for rank in group)", "test_redistribute"),
    Mutation("memory of native collectives", "layout/state.py", "memory -= room.used", "memory -= 0", "test_redistribute"),
    # training
    Mutation("gradients summed, not averaged", "training/ddp.py", "        AVG,\n", '        "SUM",\n', "test_gradients test_wrap"),
    Mutation("mean of wrapped gradients", "training/reducer.py", "op: ReduceOp = AVG", 'op: ReduceOp = "SUM"', "test_wrap test_gradients"),
    # horovod
    Mutation("gradient of a reducescatter", "horovod/gradients.py", "reduction.before * reduction.after * (ranks if reduction.op == Sum else 1)", "reduction.before * reduction.after", "test_horovod"),
    Mutation("last rank that joined", "horovod/negotiation.py", "key=lambda rank: (self._joined_since[rank], rank)", "key=lambda rank: rank", "test_horovod"),
    # rendezvous, runtime, config, launch
    Mutation("signature not checked", "core/job_store.py", "return value if hmac.compare_digest(tag, _sign(secret, what, value)) else None", "return value", "test_signing"),
    Mutation("groups dropped by some", "job/agreement.py", "if all(dropped[rank].get(name) == members for rank in members)", "if any(dropped[rank].get(name) == members for rank in members)", "test_groups test_leaks"),
    Mutation("a table given as a configuration", "config/reader.py", '<= set(rule) and "match" not in rule', '<= set(rule) and "match" in rule', "test_config test_cli"),
    Mutation("a rank that failed", "launch/job.py", "all_zero = all(state.code == 0", "all_zero = any(state.code == 0", "test_launch"),
    Mutation("restarts of a job", "launch/supervisor.py", "again = self._used < self._limit", "again = self._used <= self._limit", "test_launch_restarts"),
    Mutation("report of another process", "launch/channels.py", 'if report["pid"] == state.pid:', "if True:", "test_launch_restarts"),
    # torch
    Mutation("mean of integers", "backends/emulation.py", 'else "trunc"', 'else "floor"', "test_torch_backend test_special_values"),
    # sums
    Mutation("order of the tree", "backends/shm/reduce_kernels.py", "left % 2 == 0 or rank == ranks - 1", "rank >= 0", "test_ordered_sums"),
    Mutation("exact sums by a lossless codec", "compression/policy.py", 'if signature.sums == "exact":', 'if signature.sums == "exact" and not codec.traits.lossless:', "test_sums"),
    Mutation("sums of a parameter's rule", "config/reader.py", "if match.param is not None:", "if match.param is None and match.tag is None:", "test_interfaces"),
    Mutation("too few descriptors", "core/file_limit.py", "if there < need", "if there < 0", "test_groups test_leaks"),
)  # fmt: skip


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the working tree with its caches of compiled kernels, which look at times of files."""
    with tempfile.TemporaryDirectory(prefix="mcr-mutate-") as folder:
        root = Path(folder, "tree")
        skipped = shutil.ignore_patterns(".git", ".venv", ".mypy_cache", ".hypothesis", "*_cache")
        shutil.copytree(ROOT, root, ignore=skipped, symlinks=True)
        yield root


def finding(root: Path, tests: list[str | Path], tier: str) -> str:
    """Return the first failure on the mutated tree; "" without one. Raises `RuntimeError` if nothing ran."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # as in the Makefile
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", _TIERS[tier]]
    try:
        done = subprocess.run(
            [*command, *tests], cwd=root, env=environment, capture_output=True, text=True, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"more than {_LIMIT_S} s"
    if done.returncode not in (0, 1, 2):
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}")
    failed = re.findall(r"^(?:FAILED|ERROR) (?:\S*/)?(.*?)(?: - |$)", done.stdout, re.MULTILINE)
    return "" if done.returncode == 0 else failed[0]


def main(
    names: Annotated[list[str] | None, typer.Argument(help="words in the names of mutations")] = None,
    all_tests: Annotated[bool, typer.Option(help="run all tests for each")] = False,
    tier: Annotated[Literal["test", "all"], typer.Option(help="tests of make test, or test-all")] = "test",
) -> None:
    """Break the library, one place after another, and list what the tests find."""
    console = Console()
    table = Table("mutation", "file", "found by", "s")
    survived = 0
    for mutation in MUTATIONS:
        if names and not any(name in mutation.name for name in names):
            continue
        with copied() as root:
            mutation.apply(root)
            tests: list[str | Path] = (
                ["tests", "--ignore=tests/unit/test_layout.py"]  # which sees that a mutation has been made
                if all_tests
                else [
                    path for name in mutation.tests.split() for path in (root / "tests").glob(f"**/{name}.py")
                ]
            )
            began = time.monotonic()
            found = finding(root, tests, tier)
            survived += not found
            row = (mutation.name, mutation.path, found or "NOTHING", f"{time.monotonic() - began:.0f}")
        table.add_row(*row)
        console.print(*row, sep=" · ")
    console.print(table)
    raise typer.Exit(1 if survived else 0)


if __name__ == "__main__":
    typer.run(main)
