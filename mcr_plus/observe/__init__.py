"""What a job shows of itself: options under `observe:`, Flight Recorder dumps, their diagnosis, metrics."""
