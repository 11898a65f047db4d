"""`mcr.sync`: weights that some ranks publish and others pull, as deltas, inside a job or between jobs."""
