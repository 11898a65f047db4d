"""Rendezvous of a job's processes: store, names, secrets, wake-ups, and the end."""
