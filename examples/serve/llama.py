"""Train a small Llama of `transformers` on bytes, and push its weights to servers (`with_vllm.py` starts it).

    mcr-plus run -n 1 examples/serve/llama.py FOLDER policy.sync

FOLDER gets the checkpoint from which servers start: the weights before training, and a tokenizer.
"""

from __future__ import annotations

import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).parent.parent / "common"))  # what the examples share

import command_line
import torch
import typer
from corpus import VOCABULARY, read_corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import mcr_plus as mcr
from mcr_plus.engines.tensor_parallel import tensor_parallel_offers

SEQUENCE = 128
BATCH = 8


def tokenizer_of_bytes() -> PreTrainedTokenizerFast:
    """The token of a byte is its value."""
    printable = [
        *range(33, 127),
        *range(161, 173),
        *range(174, 256),
    ]  # which stand for themselves in GPT-2's letters
    others = [byte for byte in range(VOCABULARY) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE({letter: byte for byte, letter in letters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def built(hidden: int, seed: int) -> Any:
    """The model, with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2 * SEQUENCE,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def main(
    folder: Annotated[Path, typer.Argument(help="for the checkpoint")],
    invitation: Annotated[Path, typer.Argument(help="file for servers")],
    steps: Annotated[int, typer.Option(min=1)] = 300,
    every: Annotated[int, typer.Option(min=1, help="steps from push to push")] = 50,
    hidden: Annotated[int, typer.Option(min=8)] = 128,
    degree: Annotated[int, typer.Option(min=1, help="tensor parallel degree of the servers")] = 1,
    servers: Annotated[int, typer.Option(min=0, help="workers of servers to wait for before training")] = 0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Train and push."""
    torch.set_num_threads(1)
    with mcr.init() as comm:
        corpus, model = read_corpus(None, SEQUENCE, seed), built(hidden, seed)
        policy = deepcopy(model).bfloat16()
        offers = tensor_parallel_offers(policy, degree) if degree > 1 else None
        # the names of a checkpoint: the module itself has buffers besides
        weights = mcr.sync(policy.state_dict(), src=range(comm.size), invite=invitation, offers=offers)
        if comm.rank == 0:
            policy.save_pretrained(folder)
            tokenizer_of_bytes().save_pretrained(folder)
        while comm.rank == 0 and weights.stats()["joined"] < servers:
            time.sleep(0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        for step in range(1, steps + 1):
            windows = corpus.windows(step, comm.rank, BATCH)
            logits = model(windows[:, :-1]).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % every == 0 or step == steps:
                with torch.no_grad():
                    for target, source in zip(policy.parameters(), model.parameters(), strict=True):
                        target.copy_(source)
                version = weights.push()
                if comm.rank == 0:
                    print(
                        f"trainer  step {step:4}  loss {loss.item():.3f}  pushed version {version}",
                        flush=True,
                    )
        weights.close()


if __name__ == "__main__":
    command_line.run(main)
