"""Server of `test_vllm.py`: vLLM's `LLM`, which does what it is told, line by line, and answers in JSON.

python vllm_server.py MODEL DEGREE
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

PROMPTS = ([1, 5, 9, 20, 33], [7], [250, 3, 3, 299] * 9)


def recorded(worker: Any) -> list[str]:
    """Return the kinds of operations that a worker's pipeline has seen since the last call."""
    import mcr_plus as mcr

    if not mcr.is_initialized():
        return []
    before = getattr(worker, "mcr_recording", None)
    if before is not None:
        before[0].__exit__(None, None, None)
    recording = mcr.record()
    worker.mcr_recording = recording, recording.__enter__()
    return [] if before is None else sorted({record.kind for record in before[1].records})


def without_shared_memory(_worker: Any) -> None:
    """Let workers use torch.distributed, as vLLM does where they have no memory in common, or no AVX-512."""
    import torch.distributed as dist
    from vllm.distributed.parallel_state import get_tp_group

    get_tp_group().device_communicator.dist_module = dist


def main(folder: str, degree: int) -> None:
    """Answer until the end of the input."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder, tensor_parallel_size=degree, enforce_eager=True, max_model_len=128, skip_tokenizer_init=True,
        weight_transfer_config={"backend": "mcr"}, logprobs_mode="raw_logits", max_logprobs=-1,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=4, temperature=0, logprobs=-1, detokenize=False)

    def logits() -> list[Any]:
        llm.reset_prefix_cache()
        answers = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], sampling, use_tqdm=False)
        steps = [step for answer in answers for step in answer.outputs[0].logprobs]
        return [sorted((token, each.logprob.hex()) for token, each in step.items()) for step in steps]

    def update(timeout: float) -> Any:
        return llm.collective_rpc("mcr_plus", args=("update", timeout))

    def update_by_vllm() -> Any:
        llm.start_weight_update()
        llm.update_weights({"update_info": {"timeout": 30.0}})
        llm.finish_weight_update()
        return llm.collective_rpc("mcr_plus", args=("versions",))

    def join(invitation: str, timeout: float = 20.0) -> None:
        llm.init_weight_transfer_engine({"init_info": {"invitation": invitation, "timeout": timeout}})

    def reload(path: str) -> None:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

    def operations() -> Any:
        llm.collective_rpc(without_shared_memory)
        return llm.collective_rpc(recorded)

    known: dict[str, Any] = {
        "logits": logits, "update": update, "update_by_vllm": update_by_vllm, "join": join, "reload": reload,
        "operations": operations,
    }  # fmt: skip
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"answer": known[name](*arguments)}
        except Exception as error:  # told to the test
            answer = {"error": str(error)}
        print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # of a function, for `operations`
    main(sys.argv[1], int(sys.argv[2]))
