"""Collectives over several hosts, decomposed into steps inside the nodes and between them."""
