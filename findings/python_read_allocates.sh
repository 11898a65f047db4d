#!/bin/bash
# `file.read(n)` of a small file, CPython 3.11.7.
#
# A good guess: reading at most n bytes of a file of 3 bytes takes 3 bytes, so `read(limit + 1)` is a cheap way to
# refuse files above a limit.
#
# What happens: n bytes are allocated before anything is read, and the rest is given back afterwards; in binary and
# text mode, with and without a buffer. With a limit of 1 GiB, each small file asks for 1 GiB, which fails under a
# limit of memory (`ulimit -v`, strict overcommit).
set -eu
DIR=$(mktemp -d); trap 'rm -rf "$DIR"' EXIT; cd "$DIR"
python3 -m venv v
cat > program.py <<'PY'
import sys
import tracemalloc

LIMIT = 1 << 28
with open("small", "wb") as file:
    file.write(b"abc")

def peak(read):
    tracemalloc.start()
    content = read()
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert content in (b"abc", "abc"), content
    return used

def whole(mode, buffering=-1):
    with open("small", mode, buffering) as file:
        return file.read(LIMIT + 1)

found = {
    "open(path, 'rb').read(n)": peak(lambda: whole("rb")),
    "open(path, 'rb', buffering=0).read(n)": peak(lambda: whole("rb", 0)),
    "open(path, 'r').read(n)": peak(lambda: whole("r")),
}
print(f"Python {sys.version.split()[0]}, n = {LIMIT + 1:,}, a file of 3 bytes")
for what, used in found.items():
    print(f"{what}: {used:,} bytes at most")
sys.exit(not all(used > LIMIT for used in found.values()))
PY
v/bin/python program.py
