"""Strategies for a waiting thread: spin, yield, or sleep until a peer wakes it."""
