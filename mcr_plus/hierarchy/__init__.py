"""Collectives of several hosts, decomposed into steps inside the nodes and between them."""
