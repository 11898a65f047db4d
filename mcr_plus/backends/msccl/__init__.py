"""MSCCL: algorithm files, verified before they run, over shared memory on one host."""
