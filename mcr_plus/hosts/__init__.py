"""Processes beside the ranks of a host. This package imports neither torch nor numpy."""
