"""Configurations: documents with places, the schema, and how files are read."""
