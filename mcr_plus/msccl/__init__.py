"""MSCCL's language: algorithm files, read, written, generated, simulated and proved."""
