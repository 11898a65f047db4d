"""The backend `mcr` of `torch.distributed`."""
