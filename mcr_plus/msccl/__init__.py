"""MSCCL's language: read, write, generate, simulate and verify algorithm files."""
