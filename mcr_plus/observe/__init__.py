"""What operations did, without changing the program."""
