"""Which ranks belong to a job: its epochs, and what their members decide together."""
