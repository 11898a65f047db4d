"""Shared memory of one host: its own collectives and messages, and an interpreter of algorithm files."""
