#!/usr/bin/env bash
# torch.distributed's stores answer the same calls differently.
#
# A good guess: HashStore, FileStore and TCPStore are three implementations of one interface, so a program that is
#   tried with one runs with the others. delete_key returns False for a key that does not exist, a new store has no
#   keys, and add raises for a value that is no number.
# What happens (torch 2.13.0):
#                                     HashStore   FileStore   TCPStore
#   delete_key of a missing key       False       True        False
#   num_keys of a new store           0           1           1
#   list_keys has a key of its own    no          yes         no       (FileStore: "efcount/")
#   add(1) to the value "12abc"       13          13          13       the rest of the text is dropped
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat >"$work/stores.py" <<'PY'
import sys

import torch
from torch.distributed import FileStore, HashStore, TCPStore

stores = {
    "HashStore": HashStore(),
    "FileStore": FileStore(sys.argv[1], 1),
    "TCPStore": TCPStore("127.0.0.1", 0, 1, is_master=True),
}
found = {}
print("torch", torch.__version__)
for name, store in stores.items():
    row = [store.num_keys(), store.delete_key("missing")]
    store.set("value", "12abc")
    row += [store.add("value", 1), [key for key in store.list_keys() if key == "efcount/"]]
    found[name] = row
    print(name, dict(zip(("num_keys", "deleted", "12abc + 1", "own keys"), row, strict=True)))
sys.exit(
    found
    != {
        "HashStore": [0, False, 13, []],
        "FileStore": [1, True, 13, ["efcount/"]],
        "TCPStore": [1, False, 13, []],
    }
)
PY
"$work/venv/bin/python" "$work/stores.py" "$work/file"
