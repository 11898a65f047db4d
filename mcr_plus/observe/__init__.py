"""What a job shows of itself: options under `observe:`, dumps and their diagnosis, metrics, status pages."""
