"""Parallelism within a layer: spatially sharded tensors (`mcr.spatial`) and experts (`mcr.expert`)."""
