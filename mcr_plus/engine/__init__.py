"""Order, progress, deadlines: from a bound operation to a library call."""
