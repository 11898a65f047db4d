"""The life of a job in one process: init, groups, agreement, reset, the end of the process."""
