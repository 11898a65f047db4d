"""Whether the processes of a job live, on this host and on others. Nothing here imports torch or numpy."""
