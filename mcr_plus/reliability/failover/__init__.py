"""Failover: a library that fails in a group is replaced by the next one, on all ranks alike."""
