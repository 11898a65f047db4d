"""Order, progress and deadlines of bound operations, down to the library call."""
