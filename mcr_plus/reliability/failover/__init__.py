"""Failover: the next library replaces a library that fails in a group, on all ranks."""
