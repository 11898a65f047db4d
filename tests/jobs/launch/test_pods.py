"""The manifests of examples/kubernetes: their commands, in namespaces that stand for pods with IPv6 alone.

A container's environment is what its manifest says, and what the controllers add. That is written down here
from the sources of Kubeflow Trainer 2.3.0 (pkg/runtime/framework/plugins/torch) and JobSet 0.12.0, and from
the documentation of indexed Jobs.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from ranks import nursery
from two_hosts import TwoHosts, why_not

ROOT: Final = Path(__file__).parents[3]
FOLDER: Final = ROOT / "examples" / "kubernetes"
INDEX: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
LIMIT_S: Final = 240.0
STEPS: Final = "3"
REASON = why_not(mpi=False) or (None if Path("/proc/net/if_inet6").exists() else "this kernel has no IPv6")
needs_hosts = pytest.mark.skipif(REASON is not None, reason=f"hosts: {REASON}")


def read(name: str) -> dict[str, dict[str, Any]]:
    """Return the objects of a manifest, by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((FOLDER / name).read_text())}


def of_manifest(container: Mapping[str, Any], index: int) -> dict[str, str]:
    """Return the variables that a container's manifest names, in a pod with this completion index."""
    found = {"JOB_COMPLETION_INDEX": str(index)}  # set by the controller of Jobs
    for variable in container.get("env", []):
        if "value" in variable:
            found[variable["name"]] = variable["value"]
        elif "fieldRef" in variable["valueFrom"]:
            assert variable["valueFrom"]["fieldRef"]["fieldPath"] == INDEX
            found[variable["name"]] = str(index)
        else:
            assert "secretKeyRef" in variable["valueFrom"]
            found[variable["name"]] = "a secret of this test"
    return found


def trainer(index: int) -> tuple[list[str], dict[str, str]]:
    """Return command and variables of a pod of the TrainJob: those of the runtime, changed by Trainer."""
    objects = read("trainer.yaml")
    runtime, job = objects["ClusterTrainingRuntime"], objects["TrainJob"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"
    template = replicated["template"]
    assert template["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    (container,) = template["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node"
    name, asked = job["metadata"]["name"], job["spec"]["trainer"]
    added = {
        "PET_NNODES": str(asked["numNodes"]), "PET_NPROC_PER_NODE": str(asked["numProcPerNode"]),
        "PET_NODE_RANK": str(index), "PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "PET_MASTER_PORT": "29500",
    }  # fmt: skip
    return asked["command"] + asked["args"], of_manifest(container, index) | added


def jobset(index: int) -> tuple[list[str], dict[str, str]]:
    """Return command and variables of a pod of the JobSet."""
    job = read("jobset.yaml")["JobSet"]
    (replicated,) = job["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] == 2
    assert spec["completionMode"] == "Indexed"
    (container,) = spec["template"]["spec"]["containers"]
    found = of_manifest(container, index)
    assert found["WORLD_SIZE"] == str(spec["completions"])
    first = f"{job['metadata']['name']}-{replicated['name']}-0-0"
    assert found["MASTER_ADDR"] == f"{first}.{job['metadata']['name']}"
    return container["command"] + container["args"], found


@contextmanager
def named(hosts: TwoHosts, names: list[str], service: str) -> Iterator[None]:
    """Let hosts resolve the names of pods: by the service, and each its own name, as kubelet writes it."""
    try:
        for mine, name in zip(hosts.names, names, strict=True):
            folder = Path("/etc/netns") / mine
            folder.mkdir(parents=True)
            lines = ["127.0.0.1 localhost", "::1 localhost"]
            for address, other in zip(hosts.addresses, names, strict=True):
                lines.append(f"{address} {other}.{service} {other if other == name else ''}")
            (folder / "hosts").write_text("\n".join(lines) + "\n")
        yield
    finally:
        for mine in hosts.names:
            shutil.rmtree(Path("/etc/netns") / mine, ignore_errors=True)


def pod(namespace: str, name: str, words: list[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a container's command with its variables alone, under the pod's name."""
    kept = {each: os.environ[each] for each in ("HOME", "PYTHONPATH", "TMPDIR") if each in os.environ}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    line = ["ip", "netns", "exec", namespace, "unshare", "--uts", "bash", "-c"]
    line.append(f"hostname {name}; exec {shlex.join(words)}")
    return subprocess.Popen(
        line, cwd=ROOT, env={**kept, "PATH": path, **variables}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.long
@needs_hosts
@pytest.mark.parametrize(
    ("container", "group", "ranks"), [(trainer, "node", 4), (jobset, "workers", 2)], ids=["trainer", "jobset"]
)
def test_pods_train(container: Any, group: str, ranks: int) -> None:
    nursery()  # kernels are compiled before two pods do so
    names = [f"gpt-{group}-0-{index}" for index in range(2)]
    started: list[subprocess.Popen[str]] = []
    with TwoHosts(None, (6,)) as hosts, named(hosts, names, "gpt"):
        try:
            for index, (namespace, name) in enumerate(zip(hosts.names, names, strict=True)):
                words, variables = container(index)
                short = [STEPS if word == "200" else word for word in words]
                assert short != words
                started.append(pod(namespace, name, short, variables))
            said = [process.communicate(timeout=LIMIT_S)[0] for process in started]
        finally:
            for process in started:
                process.terminate()
                process.wait()
    assert [process.returncode for process in started] == [0, 0], said
    assert re.search(rf"on {ranks} ranks together", said[0]), said[0]
    assert "not signed" not in said[0] + said[1]


@pytest.mark.parametrize("container", [trainer, jobset])
def test_manifests_name_each_pods_rank(container: Any) -> None:
    """The variables differ by the index alone, and each image has the program that is named."""
    words, first = container(0)
    again, second = container(1)
    assert words == again
    assert (ROOT / next(word for word in words if word.endswith(".py"))).is_file()
    assert {name for name in first if first[name] != second[name]} == {
        "JOB_COMPLETION_INDEX", "PET_NODE_RANK" if container is trainer else "RANK"
    }  # fmt: skip
