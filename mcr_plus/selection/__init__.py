"""The select stage: the choice of the library that runs an operation."""
