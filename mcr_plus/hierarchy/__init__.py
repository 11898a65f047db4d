"""Collectives over several hosts, decomposed into steps inside nodes and between nodes."""
