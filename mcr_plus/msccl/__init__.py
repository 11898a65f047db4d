"""MSCCL's language: algorithm files are read, written, generated, simulated and verified."""
