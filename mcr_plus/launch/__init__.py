"""Start ranks on one host, under MPI, torchrun's elastic agent or a supervisor of our own."""
