"""Average gradients through the pipeline, for a model, an optimizer, DDP or FSDP2."""
