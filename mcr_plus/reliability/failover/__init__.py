"""Failover: if a library fails in a group, the next library replaces it on all ranks."""
