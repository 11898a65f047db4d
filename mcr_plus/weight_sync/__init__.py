"""Weights that some ranks publish and others pull as deltas (`mcr.sync`), within or between jobs."""
