"""Sums that do not depend on library, size, bucket, order or number of ranks."""
