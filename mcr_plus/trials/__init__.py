"""Trials of several candidates for an operation while the job runs."""
