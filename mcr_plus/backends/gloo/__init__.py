"""gloo, through torch's ProcessGroupGloo."""
