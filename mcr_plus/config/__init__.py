"""Configurations: documents with source locations, the schema, and the reader."""
