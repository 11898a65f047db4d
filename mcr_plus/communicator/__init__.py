"""A group of ranks: its operations, their arguments and tensors, and what is bound once for many calls."""
