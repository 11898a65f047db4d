"""Verification of operations: ranks compare checksums of received and sent payloads."""
