"""transformers: tensor-parallel decode by `tp_plan="auto"`, in the group that the program has made."""

from __future__ import annotations

import tempfile
from importlib import import_module
from typing import Any, Final

import torch
import torch.distributed as dist
from clients.job import main

transformers: Final[Any] = import_module("transformers")
transformers.logging.set_verbosity_error()
Auto: Final[Any] = transformers.AutoModelForCausalLM  # imports happen here, before a client is timed
Llama: Final[Any] = transformers.LlamaForCausalLM
PROMPT: Final = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
TOKENS: Final = 12


def text(model: Any) -> list[list[int]]:
    """Return the text that a model generates greedily from the prompts."""
    limits = {"min_new_tokens": TOKENS, "max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    made = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **limits)
    tokens: list[list[int]] = made[:, PROMPT.shape[1] :].tolist()
    return tokens


def decoded() -> list[float]:
    """Tokens and a logit of a Llama on all ranks; raises if one process makes other tokens."""
    config = transformers.LlamaConfig(
        vocab_size=101, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.5, eos_token_id=None,
    )  # fmt: skip
    alone = Llama(config).eval()
    with tempfile.TemporaryDirectory(prefix="mcr-client-") as folder:
        alone.save_pretrained(folder)  # which writes nothing on other ranks than the first
        shared = [folder]
        dist.broadcast_object_list(shared, 0)
        together = Auto.from_pretrained(shared[0], tp_plan="auto", dtype=torch.float32)
        dist.barrier()
    tokens = text(together.eval())
    if tokens != text(alone):
        raise AssertionError(f"{tokens} by all ranks, {text(alone)} by one process")
    with torch.no_grad():
        logits = together(PROMPT).logits
        torch.testing.assert_close(logits, alone(PROMPT).logits, rtol=1e-4, atol=1e-4)
    return [*(float(token) for row in tokens for token in row), logits.abs().max().item()]


if __name__ == "__main__":
    main({"decode": decoded})
