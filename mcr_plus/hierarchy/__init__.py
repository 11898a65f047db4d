"""Collectives of several hosts in steps: inside the nodes, and between them."""
