"""Backend `mcr` of `torch.distributed`."""
