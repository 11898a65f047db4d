"""Tuning tables: rules, cost, fingerprints, files, and formats of other libraries."""
