"""Run unmodified training programs on a cluster that is not there."""
