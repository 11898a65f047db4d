"""The page about a recorded job: `mcr-plus report`."""
