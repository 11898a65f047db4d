"""TRL: its trainer of supervised fine-tuning; as Accelerate, on a CPU it takes no backend but gloo's name."""

from __future__ import annotations

import tempfile
from importlib import import_module
from typing import Any, Final

import torch
from clients.job import STEPS, main

accelerate: Final[Any] = import_module("accelerate")
datasets: Final[Any] = import_module("datasets")
tokenizers: Final[Any] = import_module("tokenizers")
transformers: Final[Any] = import_module("transformers")
trl: Final[Any] = import_module("trl")
transformers.logging.set_verbosity_error()
datasets.disable_progress_bars()
ROWS: Final = 2
WORDS: Final = [f"word{number}" for number in range(40)]


def fine_tuned() -> list[float]:
    """Fine-tune a tiny Llama of random weights."""
    known = {word: number for number, word in enumerate(["<end>", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, "<end>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", pad_token="<end>"
    )
    config = transformers.LlamaConfig(
        vocab_size=len(known), hidden_size=32, intermediate_size=44, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=0, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    drawn = torch.randint(0, len(WORDS), (2 * STEPS * ROWS, 9), generator=torch.Generator().manual_seed(1))
    texts = [{"text": " ".join(WORDS[each] for each in row)} for row in drawn.tolist()]
    arguments = trl.SFTConfig(
        output_dir=tempfile.mkdtemp(prefix="mcr-client-"), use_cpu=True, bf16=False,
        per_device_train_batch_size=ROWS, num_train_epochs=1, logging_steps=1, report_to=[],
        save_strategy="no", disable_tqdm=True, seed=0, gradient_checkpointing=False, max_length=16,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=transformers.LlamaForCausalLM(config),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(texts),
        processing_class=tokenizer,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] or [0.0]


if __name__ == "__main__":
    main({"sft": fine_tuned}, lambda backend: accelerate.Accelerator(cpu=True))
