"""Which library an operation goes to."""
