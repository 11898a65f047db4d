"""What a job shows of itself: the options under `observe:`, Flight Recorder dumps, their diagnosis, and metrics."""
