"""Membership of a job: its epochs, and the decisions of their members."""
