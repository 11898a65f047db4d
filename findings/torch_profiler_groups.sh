#!/usr/bin/env bash
# What a profile of torch says about process groups (torch 2.13.0, gloo, 3 ranks, CPU).
#
# A good guess: the Kineto trace and the execution trace of one profile describe the same groups; with
# record_shapes=True an all_reduce of all ranks and one of the ranks [0, 2] can be told apart; and the number of
# ranks is in the trace whenever there was a process group when it was written.
#
# What happens:
# - Kineto's distributedInfo lists the ranks of the default group, [0, 1, 2]; the execution trace of the same
#   profile has an empty list for it, beside group_size 3. It lists the ranks of other groups.
# - Over gloo the two all_reduces have the same arguments in both files, ids and times aside: none names a group,
#   its size or its ranks. (There is no record_param_comms, which NCCL's operations have.)
# - What is said about groups is collected when recording starts. If init_process_group is called after that,
#   neither file has the number of ranks, although both have the operations, and the file is written while the
#   group exists.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
cat > "$folder/ranks.py" <<'PY'
import os, sys
import torch, torch.distributed as dist
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

rank, folder, late = int(os.environ["RANK"]), sys.argv[1], sys.argv[2] == "late"
observer = ExecutionTraceObserver()
observer.register_callback(f"{folder}/{sys.argv[2]}-et{rank}.json")


def groups():
    dist.init_process_group("gloo")
    return dist.new_group([0, 2])


group = None if late else groups()
with profile(
    activities=[ProfilerActivity.CPU], record_shapes=True, execution_trace_observer=observer
) as found:
    group = groups() if late else group
    x = torch.ones(4)
    dist.all_reduce(x)
    if rank != 1:
        dist.all_reduce(x, group=group)
found.export_chrome_trace(f"{folder}/{sys.argv[2]}-kineto{rank}.json")
dist.destroy_process_group()
PY
cat > "$folder/look.py" <<'PY'
import json, sys
import torch

folder = sys.argv[1]
print("torch", torch.__version__)


def load(name):
    with open(f"{folder}/{name}0.json") as file:
        return json.load(file)


def initialized(graph):
    nodes = [node for node in graph["nodes"] if "process_group:init" in node["name"]]
    return [json.loads(node["inputs"]["values"][0]) for node in nodes]


ids = {"External id", "Record function id", "Ev Idx", "Sequence number", "Fwd thread id"}
kineto, graph = load("early-kineto"), load("early-et")
of_kineto = [each["ranks"] for each in kineto["distributedInfo"]["pg_config"]]
(of_graph,) = initialized(graph)
print("Kineto's groups:", of_kineto)
print("groups of the execution trace:", [(each["ranks"], each["group_size"]) for each in of_graph])
calls = [
    {key: value for key, value in event["args"].items() if key not in ids}
    for event in kineto["traceEvents"]
    if event["name"] == "c10d::allreduce_"
]
print("arguments of the all_reduces of 3 and of 2 ranks:", *calls, sep="\n  ")
nodes = [
    ([a for a in node["attrs"] if a["name"] not in ("rf_id", "seq_id")], node["inputs"]["shapes"])
    for node in graph["nodes"]
    if node["name"] == "c10d::allreduce_"
]
late, late_graph = load("late-kineto"), load("late-et")
operations = sum(event["name"] == "c10d::allreduce_" for event in late["traceEvents"])
print("a group made while recording:", operations, "all_reduces; distributedInfo:", late.get("distributedInfo"))
print("  groups of the execution trace:", initialized(late_graph))
assert of_kineto == [[0, 1, 2], [0, 2]]
assert [(each["ranks"], each["group_size"]) for each in of_graph] == [([], 3), ([0, 2], 2)]
assert len(calls) == 2 and calls[0] == calls[1] and not any("roup" in key for key in calls[0])
assert len(nodes) == 2 and nodes[0] == nodes[1]
assert not any(event["name"] == "record_param_comms" for event in kineto["traceEvents"])
assert operations == 2 and "distributedInfo" not in late and initialized(late_graph) == []
PY
for when in early late; do
  "$folder/venv/bin/python" -m torch.distributed.run --nproc-per-node 3 "$folder/ranks.py" "$folder" "$when" \
    > "$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
done
"$folder/venv/bin/python" "$folder/look.py" "$folder"
