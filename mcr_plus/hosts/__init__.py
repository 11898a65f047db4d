"""The processes beside the ranks of a host, and what they do. Nothing here imports torch or numpy."""
