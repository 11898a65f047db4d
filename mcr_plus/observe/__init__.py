"""What a running job shows to its user from outside. Nothing here imports torch or numpy."""
