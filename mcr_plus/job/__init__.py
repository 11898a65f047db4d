"""The life of a job in one process: init, groups, agreement, reset and exit."""
