"""Base class of stages, and the pipeline that binds them to a signature."""
