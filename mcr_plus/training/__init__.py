"""Training: averaging the gradients of a model, an optimizer, DDP or FSDP2 through the pipeline."""
