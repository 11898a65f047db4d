"""Communication hook for DistributedDataParallel. DDP inspects its annotations, so they are not strings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

import torch
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.communicator.gradient_policy import TAG, policy_for_bucket
from mcr_plus.core.kinds import AVG
from mcr_plus.core.work import Work
from mcr_plus.job.init import member_of
from mcr_plus.training.flat import keeps_inputs

Result = torch.futures.Future[torch.Tensor]


@dataclass
class DDPState:
    """State of `ddp_hook`: the group (None: the whole job) and the options of its operations.

    `passes` counts the backward passes: DDP rebuilds its buckets after the first pass, so a codec that keeps
    state between calls is used from the second pass on. `number` distinguishes models, so all ranks must
    create their states in the same order. `results` maps a bucket's index to two tensors for its means, used
    in turn with `dispatch: {failover: true}`.
    """

    group: Communicator | None = None
    backend: str | None = None
    compress: str | Mapping[str, object] | bool | None = None
    tag: str | None = TAG
    passes: int = 0
    number: int = field(default_factory=count().__next__)
    pending: list[tuple[Work, torch.Tensor, Result]] = field(default_factory=list)
    results: dict[int, list[torch.Tensor]] = field(default_factory=dict, repr=False)

    def result_of(self, index: int, values: torch.Tensor) -> torch.Tensor:
        """Return memory for the means of a bucket, so that DDP's `values` are not overwritten.

        The means of the last pass stay intact until the pass after the next.
        """
        found = self.results.get(index, [])
        if not found or found[0].shape != values.shape or found[0].dtype != values.dtype:
            self.results[index] = found = [torch.empty_like(values) for _ in range(2)]
        found.reverse()
        return found[0]

    def finish(self) -> None:
        """Wait for pending operations; DDP itself waits for the futures without driving progress."""
        pending, self.pending = self.pending, []
        for work, values, future in pending:
            _resolve(work, values, future)


def _resolve(work: Work, values: torch.Tensor, future: Result) -> None:
    try:
        work.wait()
    except Exception as error:
        future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it wrongly
    else:
        future.set_result(values)


def ddp_hook(state: DDPState, bucket: GradBucket) -> Result:
    """Average a bucket of DDP: `ddp_model.register_comm_hook(mcr.DDPState(), mcr.ddp_hook)`.

    The model's process group may have any backend; DDP uses it only for set-up. The group of `state` must
    have the same ranks in the same order. DDP does not pass the names of parameters, so rules by `param` and
    exemptions do not apply.

    Args:
        state: one for each model, created on all ranks in the same order.
        bucket: the bucket of gradients, passed by DDP.

    Raises:
        NotInitialized: there is no job, or the group of `state` is closed. `backward()` raises this error and
            the errors of the operations.

    Example:
        ```python
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("mcr")
        model = DistributedDataParallel(torch.nn.Linear(4, 2))
        model.register_comm_hook(mcr.DDPState(), mcr.ddp_hook)
        model(torch.full((3, 4), float(dist.get_rank()))).sum().backward()
        assert model.module.weight.grad.unique().tolist() == [1.5]  # the mean of 0 and 3, of two ranks
        dist.destroy_process_group()
        ```
    """
    values = bucket.buffer()
    comm = member_of(state.group)
    parts = tuple(tuple(param.shape) for param in bucket.parameters())
    policy = policy_for_bucket(comm.config, state.compress, values, state.tag, comm.size)
    encoded = policy.encoded and (state.passes > 0 or not policy.keeps)
    for carries in comm.hooks.carries:
        carries(bucket.parameters())
    in_place = policy.encoded or not keeps_inputs(comm, values)
    result = values if in_place else state.result_of(bucket.index(), values)
    work = comm.send_bucket(
        values,
        AVG,
        members=len(parts),
        into=result,
        backend=state.backend,
        compress=state.compress if encoded or not policy.encoded else False,
        tag=state.tag,
        parts=parts if encoded else None,
        key=f"DDP {state.number}, bucket {bucket.index()}" if encoded else None,
    )
    state.passes += bucket.is_last()
    devices: list[int | str | torch.device] | None = None if values.is_cpu else [values.device]
    future: Result = torch.futures.Future(devices=devices)
    first = not state.pending
    state.pending.append((work, result, future))
    if first:
        try:
            # Queue this before DDP's own callback, which waits for the futures.
            Variable._execution_engine.queue_callback(state.finish)
        except RuntimeError:  # outside of a backward pass, for buckets with only unused parameters
            state.finish()
    else:
        comm.progress()
    return future
