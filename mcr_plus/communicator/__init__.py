"""Groups of ranks: operations, checks of their arguments, layout of their tensors, persistent operations."""
