"""The seam between stages: the base class of stages, and their binding to a signature."""
