"""Observation of running jobs: options under `observe:`, dumps, diagnosis, metrics and status pages."""
