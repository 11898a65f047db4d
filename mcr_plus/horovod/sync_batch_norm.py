"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from mcr_plus.errors import InvalidArgument
from mcr_plus.horovod.ops import allreduce
from mcr_plus.horovod.reducing import Sum
from mcr_plus.horovod.world import ProcessSet, global_process_set


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm1d`, `2d` or `3d` that uses mean and variance of all ranks' batches in training.

    Input: [n, num_features, ...]; n may differ between ranks. Statistics are computed in float32 or wider.
    Gradients belong to the sum of all ranks' losses. Evaluation does not communicate.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise InvalidArgument(f"input: expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise `input`."""
        self._check_input_dim(input)
        if not (self.training or not self.track_running_stats):
            return super().forward(input)
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = [dim for dim in range(values.dim()) if dim != 1]
        shape = [1, -1] + [1] * (values.dim() - 2)
        count = values.new_full((1,), values.numel() // max(values.shape[1], 1))
        # Two passes, the first for the mean, because E[x²] - E[x]² would lose digits to cancellation.
        sums = allreduce(torch.cat([values.sum(dims), count]), op=Sum, process_set=self.process_set)
        total = sums[-1].detach()
        mean = sums[:-1] / total
        centred = values - mean.view(shape)
        squares = allreduce(centred.square().sum(dims), op=Sum, process_set=self.process_set)
        variance = squares / total
        self._track(mean.detach(), variance.detach(), total)
        result = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, total: torch.Tensor) -> None:
        if not (self.training and self.track_running_stats):
            return
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked += 1
            weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
            unbiased = variance * (total / (total - 1).clamp(min=1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)
