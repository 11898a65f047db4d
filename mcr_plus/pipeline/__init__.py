"""The seam between stages: what a stage is, and how stages are bound to a signature."""
