"""What a job shows of itself: the options under `observe:`, Flight Recorder dumps, and their diagnosis."""
