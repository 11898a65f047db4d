"""Parallelism inside a layer: tensors spread over space (`mcr.spatial`), experts (`mcr.expert`)."""
