"""Optimizers of whole matrices over sharded parameters (`mcr.owned`)."""
