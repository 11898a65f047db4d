"""Training: gradients of a model, an optimizer or DDP flow into the pipeline as they become ready."""
