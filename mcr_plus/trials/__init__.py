"""Comparing several ways to issue an operation while the job runs."""
