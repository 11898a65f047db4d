"""Shared memory on one host: direct collectives, messages, and an interpreter of algorithm files."""
