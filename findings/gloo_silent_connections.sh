#!/usr/bin/env bash
# Connections to the port of a gloo process group that send nothing.
#
# A good guess: once all ranks of a group are connected, the port is closed, or a connection that does not say
# which rank it comes from is dropped after the timeout of the group.
#
# What happens (torch 2.13.0, CPU, Linux x86-64): every rank listens as long as the group lives, and accepts
# whatever connects. Each of 50 idle connections costs it one file descriptor, also after the timeout of the
# group (2 s) has passed twice, and even after the other end has closed.
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install -qq --disable-pip-version-check 'torch==2.13.0' numpy
cat >"$work/program.py" <<'P'
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def sockets():
    names = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return {name: os.readlink(name) for name in names if os.path.exists(name) or os.path.islink(name)}


def listening():
    """Ports of this process that listen, by the kernel's numbers of its sockets."""
    own = {target[8:-1] for target in sockets().values() if target.startswith("socket:[")}
    with open("/proc/self/net/tcp") as table:
        rows = [line.split() for line in list(table)[1:]]
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in own}


rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=2))
dist.all_reduce(torch.ones(1))
if rank == 0:
    (port,) = listening()
    before = len(sockets())
    client = "import socket, sys, time\n"
    client += "held = [socket.create_connection(('127.0.0.1', int(sys.argv[1]))) for _ in range(50)]\n"
    client += "print('connected', flush=True)\nsys.stdin.read()\n"
    idle = subprocess.Popen(
        [sys.executable, "-c", client, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    before += 2  # the pipes to it
    idle.stdout.readline()
    time.sleep(5)
    during = len(sockets()) - before
    idle.communicate()
    time.sleep(4)
    after = len(sockets()) - (before - 2)
    print(f"torch {torch.__version__}: {during} descriptors more with 50 idle connections, {after} after their end")
    store.set("status", str(int((during, after) != (50, 50))))
store.set_timeout(timedelta(seconds=60))
status = int(store.get("status"))
os._exit(status)
P
export GLOO_SOCKET_IFNAME=lo
"$work/venv/bin/python" "$work/program.py" 1 "$work/store" &
other=$!
status=0
timeout 120 "$work/venv/bin/python" "$work/program.py" 0 "$work/store" || status=$?
wait "$other" || status=$?
[ "$status" = 0 ] || echo "not as described"
exit "$status"
