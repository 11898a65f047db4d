"""The HTML report about a recorded job: `mcr-plus report`."""
