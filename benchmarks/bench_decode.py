"""Tokens per second of transformers' tensor-parallel decode: over mcr, over gloo, and by one process.

    python benchmarks/bench_decode.py --rounds 7
    python benchmarks/bench_decode.py --hosts 2 --rate 1gbit --per-host 2
    python benchmarks/bench_decode.py --models tiny --dtypes float32 --busy 20   beside so many others

Models of random weights are made on the spot. Ranks load them with `tp_plan="auto"` and generate greedily, by
the same program over both backends; one process does the same with a thread for each core. On two hosts (two
network namespaces with a link of the rate) the backend `mcr` has a table that `mcr-plus tune` has measured
there, alone and with the stage `hierarchical`; then come the all_reduces of 4 to 64 KiB by themselves, flat
and in steps. Jobs load a model once and take turns; of the turns the median counts. transformers is needed,
which is no dependency of mcr_plus. The report goes to benchmarks/results/decode_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import count, product
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import harness
import torch
import torch.distributed as dist
import typer
from bench_beside import busy
from harness import HARDWARE, MCR_PLUS, Budget, Call, Dated, Hardware, Launch, Rate, Rounds, Tables
from two_hosts import ADDRESSES, TwoHosts, need_two_hosts

import mcr_plus as mcr
from mcr_plus.core.environment import cores
from mcr_plus.core.units import format_size

PROMPT: Final = 16  # tokens
DTYPES: Final = ("float32", "bfloat16")
SIZES: Final = tuple(kib << 10 for kib in (4, 8, 16, 32, 64))
POLL_S: Final = 0.02
PORT: Final = 29510  # of the first job's store
KINDS: Final = "all_reduce,all_gather,broadcast,barrier"


@dataclass(frozen=True)
class Shape:
    """Of a Llama."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int

    @property
    def parameters(self) -> int:
        """How many it has; norms are not counted."""
        hidden = self.hidden_size
        attention = 2 * hidden * hidden * (1 + self.num_key_value_heads / self.num_attention_heads)
        layer = int(attention) + 3 * hidden * self.intermediate_size
        return self.num_hidden_layers * layer + 2 * self.vocab_size * hidden


MODELS: Final = {
    "tiny": Shape(4096, 256, 4, 8, 4, 704),
    "0.1B": Shape(32000, 768, 12, 12, 4, 2048),
    "0.5B": Shape(32000, 1024, 24, 16, 8, 4352),
}


@dataclass(frozen=True)
class Way:
    """A candidate: the backend, None for one process, and its pipeline if it has one."""

    name: str
    backend: str | None
    config: dict[str, Any] | None = None


MCR: Final = Way("mcr", "mcr")
GLOO: Final = Way("gloo", "gloo")
ALONE: Final = Way("one process", None)


def on_hosts(table: Path) -> list[Way]:
    """The candidates on two hosts."""

    def pipeline(*first: Mapping[str, Any]) -> dict[str, Any]:
        stages = [*first, {"select": {"table": str(table)}}, {"dispatch": {}}]
        return {"version": 1, "pipeline": stages}

    return [
        Way("mcr", "mcr", pipeline()),
        Way("mcr, hierarchical", "mcr", pipeline({"hierarchical": {}})),
        GLOO,
    ]


# --- a job --------------------------------------------------------------------------------------------------


def serve(way: dict[str, Any], threads: int, model: str, dtype: str, turns: str, port: int) -> None:
    """On ranks: load a model, then generate whenever it is this job's turn."""
    torch.set_num_threads(threads)
    transformers: Any = import_module("transformers")
    transformers.logging.set_verbosity_error()
    if way["backend"] is not None:
        join(way["backend"], way["config"], port)
    plan = {} if way["backend"] is None else {"tp_plan": "auto"}
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), **plan)
    network.eval()
    for number in count():
        asked = await_file(Path(turns, f"turn{number}"))
        if asked["way"] is None:
            break
        if asked["way"] == way["name"]:
            generate(network, asked["batch"], 4)
            answer = generate(network, asked["batch"], asked["tokens"])
            if way["backend"] is None or dist.get_rank() == 0:
                put(Path(turns, f"answer{number}"), answer)
    if dist.is_initialized():
        dist.destroy_process_group()


def join(backend: str, config: dict[str, Any] | None, port: int) -> None:
    """Make the default group, also under mpirun."""
    known = os.environ
    if "RANK" not in known:
        known["RANK"], known["WORLD_SIZE"] = known["OMPI_COMM_WORLD_RANK"], known["OMPI_COMM_WORLD_SIZE"]
        known["LOCAL_RANK"] = known["OMPI_COMM_WORLD_LOCAL_RANK"]
        known.update(MASTER_ADDR=ADDRESSES[0], MASTER_PORT=str(port))
    dist.init_process_group(backend, pg_options=config)


def generate(network: Any, batch: int, tokens: int) -> dict[str, Any]:
    """Greedily, after a prompt that is the same everywhere: the tokens, and the seconds that they took."""
    generator = torch.Generator().manual_seed(batch)
    prompt = torch.randint(1, network.config.vocab_size, (batch, PROMPT), generator=generator)
    limits = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    began = time.perf_counter()
    made = network.generate(prompt, attention_mask=torch.ones_like(prompt), **limits)
    spent = time.perf_counter() - began
    return {"seconds": spent, "tokens": made[:, PROMPT:].tolist()}


def await_file(path: Path) -> Any:
    """The JSON document in a file that another process writes; a job that is not running takes no core."""
    while not path.exists():
        time.sleep(POLL_S)
    return json.loads(path.read_text())


def put(path: Path, document: Any) -> None:
    """Write a file that others wait for."""
    path.with_suffix(".part").write_text(json.dumps(document))
    path.with_suffix(".part").rename(path)


class Jobs:
    """Jobs of one model that take turns; of each the program is the same but for the backend."""

    def __init__(self, ways: Sequence[Way], many: Launch, one: Launch, model: Path, dtype: str) -> None:
        """`many`, `one`: start a program as the ranks, and as one process."""
        self._folder = tempfile.TemporaryDirectory(prefix="mcr-decode-")
        self._turns, self._number = Path(self._folder.name), count()
        self._pool = ThreadPoolExecutor(len(ways))
        self._running: list[Future[Any]] = []
        for index, way in enumerate(ways):
            launch, threads = (one, cores()) if way.backend is None else (many, 1)
            words = asdict(way), threads, str(model), dtype, self._folder.name, PORT + index
            self._running.append(self._pool.submit(harness.on_ranks, launch, serve, *words))

    def turn(self, way: Way, batch: int, tokens: int) -> dict[str, Any]:
        """What a job has generated, when it is its turn."""
        number = next(self._number)
        put(self._turns / f"turn{number}", {"way": way.name, "batch": batch, "tokens": tokens})
        answer = self._turns / f"answer{number}"
        while not answer.exists():
            time.sleep(POLL_S)
            for job in self._running:
                if job.done():
                    job.result()  # raises what went wrong
                    raise SystemExit("a job has ended before its turn")
        found: dict[str, Any] = json.loads(answer.read_text())
        return found

    def end(self) -> None:
        """End the jobs."""
        put(self._turns / f"turn{next(self._number)}", {"way": None})
        self._pool.shutdown()
        for job in self._running:
            job.result()
        self._folder.cleanup()


# --- models -------------------------------------------------------------------------------------------------


def make(shape: Shape, dtype: str, folder: Path) -> None:
    """Save a Llama of random weights."""
    transformers: Any = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**asdict(shape), tie_word_embeddings=False, eos_token_id=None)
    transformers.utils.logging.disable_progress_bar()
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    network.save_pretrained(folder)


def measure(
    jobs: Jobs, ways: Sequence[Way], batches: Sequence[int], tokens: int, rounds: int, beside: int
) -> Iterator[tuple[int, dict[str, float], dict[str, Any]]]:
    """Of every batch: tokens per second by candidate, and what each has generated.

    `beside`: so many other processes are busy in the meantime.
    """
    for way in ways if beside else ():
        jobs.turn(way, batches[0], 1)  # the models are loaded before the others take the cores
    for batch in batches:
        turns = {way.name: partial(jobs.turn, way, batch, tokens) for way in ways}
        with busy(beside):
            found = harness.in_turns(turns, rounds, lambda turn: turn())
        rates = {
            name: batch * tokens / median(each["seconds"] for each in answers)
            for name, answers in found.items()
        }
        yield batch, rates, {name: answers[0]["tokens"] for name, answers in found.items()}


def agreement(made: Mapping[str, Any], name: str) -> str:
    """Of how many texts all tokens are the same as those of the candidate `name`, in every other one."""
    texts = made[name]
    same = sum(all(other[row] == text for other in made.values()) for row, text in enumerate(texts))
    return f"{same} of {len(texts)}"


# --- all_reduces between hosts ------------------------------------------------------------------------------

STEPS: Final[dict[str, dict[str, Any]]] = {
    "flat": {"kinds": []},
    "hierarchical: {}": {},
    "hierarchical: {min: 0}": {"min": 0},
}
"""Options of the stage, by the tag that the rules match."""
TORCH: Final = "torch's gloo"


def reduced(table: str, rounds: int) -> list[dict[str, Any]] | None:
    """On ranks: median microseconds of an all_reduce by size and candidate, of the slowest rank."""
    torch.set_num_threads(1)
    stages = [{"hierarchical": {}}, {"select": {"table": table}}, {"dispatch": {}}]
    rules = [{"match": {"tag": tag}, "hierarchical": options} for tag, options in STEPS.items() if options]
    rows = []
    with mcr.init({"version": 1, "pipeline": stages, "rules": rules}) as comm:
        harness.join_gloo(comm)
        for nbytes in SIZES:
            values = {tag: torch.full((nbytes // 4,), float(comm.rank)) for tag in STEPS}
            calls: dict[str, Call] = {
                tag: partial(comm.all_reduce, each, mcr.MAX, tag=tag) for tag, each in values.items()
            }
            values[TORCH] = torch.full((nbytes // 4,), float(comm.rank))
            calls[TORCH] = partial(dist.all_reduce, values[TORCH], op=dist.ReduceOp.MAX)
            for tag, call in calls.items():
                call()
                if bool((values[tag] != comm.size - 1).any()):
                    raise SystemExit(f"{tag}: all_reduce of {nbytes} bytes is wrong")
            spent = harness.slowest(
                calls, rounds, comm.barrier, lambda each: max(comm.all_gather_object(each)), turn_s=0.3
            )
            rows.append({"bytes": nbytes, **{tag: median(each) for tag, each in spent.items()}})
    return rows if comm.rank == 0 else None


# --- what came out ------------------------------------------------------------------------------------------


def row_of(rates: Mapping[str, float], made: Mapping[str, Any]) -> list[str]:
    """The figures of a line of the report."""
    ours = rates[MCR.name]
    others = [name for name in rates if name != MCR.name]
    ratios = [f"{ours / rates[name]:.2f}" for name in others]
    rate = [f"{rates[name]:.1f}" for name in (MCR.name, *others)]
    return [*rate, *ratios, agreement(made, MCR.name)]


def head_of(ways: Sequence[Way]) -> list[str]:
    """The names of its columns."""
    others = [way.name for way in ways if way.name != MCR.name]
    return ["what", "batch", MCR.name, *others, *(f"mcr / {name}" for name in others), "same texts"]


def text_of(
    rows: Sequence[Sequence[str]], head: Sequence[str], flat: Sequence[Mapping[str, Any]], about: str
) -> str:
    """The report as Markdown."""
    shapes = ", ".join(f"{name}: {shape.parameters / 1e6:.0f} million" for name, shape in MODELS.items())
    version = import_module("transformers").__version__
    note = (
        f"transformers {version}; {about}. Llamas of random weights ({shapes} parameters), greedy, prompts "
        f"of {PROMPT} tokens. Tokens per second of the batch, prompt included; medians of rounds in which "
        "jobs take turns. `same texts`: of a batch, those for which all candidates have the same tokens."
    )
    parts = [harness.markdown(head, rows)]
    if flat:
        parts += [
            "## All_reduces of these sizes",
            "Microseconds of the slowest rank by the same table, medians of rounds in which they take turns.",
            harness.markdown(
                ["bytes", *STEPS, TORCH],
                [
                    [format_size(row["bytes"]), *(f"{row[tag]:.0f}" for tag in (*STEPS, TORCH))]
                    for row in flat
                ],
            ),
        ]
    return harness.page("Tensor-parallel decode by transformers", harness.command(), note, *parts)


@harness.program
def main(
    models: Annotated[list[str], typer.Option(default_factory=lambda: list(MODELS))],
    batches: Annotated[list[int], typer.Option(default_factory=lambda: [1, 8])],
    dtypes: Annotated[list[str], typer.Option(default_factory=lambda: list(DTYPES))],
    tokens: Annotated[int, typer.Option(min=1, help="Of each text.")] = 32,
    hosts: Annotated[int, typer.Option(min=1, max=2)] = 1,
    per_host: Annotated[int, typer.Option(help="Ranks on each host.")] = 2,
    rate: Rate = "1gbit",
    table: Tables = None,
    tune: Budget = "60s",
    alone: Annotated[bool, typer.Option(help="Also by one process, without ranks.")] = True,
    busy_processes: Annotated[int, typer.Option("--busy", min=0, help="So many beside the jobs.")] = 0,
    rounds: Rounds = 7,
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    harness.chosen(models, MODELS, "model")
    harness.chosen(dtypes, DTYPES, "dtype")
    if find_spec("transformers") is None:
        raise SystemExit("skipped: transformers is not installed")
    if hosts > 1:
        need_two_hosts()
    rows, flat = [], []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        if hosts > 1:
            both = stack.enter_context(TwoHosts(rate))
            many = harness.on_both(both, per_host=per_host, yields=False)
            known = (table or folder / "table.yaml").absolute()
            if not known.exists():
                words = ["tune", "-o", str(known), "--kinds", KINDS, "--max", "4MiB", "--budget", tune]
                many([*MCR_PLUS[1:], *words])
            flat = harness.on_ranks(many, reduced, str(known), rounds)
            print(*flat, sep="\n", flush=True)
            ways = on_hosts(known)
        else:
            many, ways = harness.here(per_host), [MCR, GLOO, *([ALONE] if alone else [])]
        head = head_of(ways)
        for model, dtype in product(models, dtypes):
            make(MODELS[model], dtype, folder / model)
            jobs = Jobs(ways, many, harness.here(1), folder / model, dtype)
            try:
                for batch, rates, made in measure(jobs, ways, batches, tokens, rounds, busy_processes):
                    rows.append([f"{model}, {dtype}", str(batch), *row_of(rates, made)])
                    print(*rows[-1], sep="  ", flush=True)
            finally:
                jobs.end()
    about = f"{per_host} ranks of one thread"
    if alone:
        about += f", and one process of {cores()} threads"
    if hosts > 1:
        about = f"two network namespaces with {per_host} ranks and half of the cores each, {rate}"
    about += f"; load average at the end {os.getloadavg()[0]:.1f}"
    harness.show(head, rows)
    suffix = "" if hosts == 1 else "-two-hosts"
    harness.write(text_of(rows, head, flat, about), output, f"decode_{hardware}{suffix}")


if __name__ == "__main__":
    main()
