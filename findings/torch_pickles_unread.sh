#!/usr/bin/env bash
# torch: pickle.dumps and pickle.loads of a tensor of a newer dtype (float8, uint16, uint32, uint64, complex32).
#
# A good guess: the tensor comes back, as one of bfloat16 does, and as torch.save and torch.load bring it back; or
# dumps raises, before anything is sent. It concerns whoever pickles by itself: queues of processes, caches,
# the object collectives of torch.distributed (broadcast_object_list and others).
# What happens (torch 2.13.0; 2.6.0 and 2.15.0 alike): dumps works, and loads raises AttributeError, "type object
# 'torch.storage.UntypedStorage' has no attribute 'dtype'". So in broadcast_object_list the sender is content and
# each receiver raises. For gloo's float8 or uint16 the object collectives are the usual way out, since its
# collectives have no such dtypes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$folder/venv/bin/python" - "$folder" <<'PROGRAM'
import io
import pickle
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DTYPES = ("bfloat16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")


def made(name):
    return torch.arange(8, dtype=torch.uint8).view(getattr(torch, name))


def rank(number, folder, answers):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    objects = [made("float8_e4m3fn") if number == 0 else None]
    try:
        dist.broadcast_object_list(objects, 0)
        answers.put((number, "no error"))
    except AttributeError as error:
        answers.put((number, f"AttributeError: {error}"))
    dist.barrier()
    dist.destroy_process_group()


print("torch", torch.__version__)
found = {}
for name in DTYPES:
    written = pickle.dumps(made(name))
    try:
        pickle.loads(written)
        found[name] = "comes back"
    except AttributeError as error:
        found[name] = f"AttributeError: {error}"
    saved = io.BytesIO()
    torch.save(made(name), saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved).view(torch.uint8), made(name).view(torch.uint8))
    print(f"{name}: pickle: {found[name]}; torch.save: comes back")
context = mp.get_context("fork")
answers = context.Queue()
ranks = [context.Process(target=rank, args=(number, sys.argv[1], answers)) for number in range(2)]
for each in ranks:
    each.start()
told = dict(answers.get(timeout=120) for _ in ranks)
for each in ranks:
    each.join()
print("broadcast_object_list of float8_e4m3fn over gloo:", {number: told[number] for number in sorted(told)})
right = found.pop("bfloat16") == "comes back" and all("UntypedStorage" in each for each in found.values())
sys.exit(0 if right and told[0] == "no error" and "UntypedStorage" in told[1] else 1)
PROGRAM
