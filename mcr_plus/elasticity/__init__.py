"""`mcr.elastic`, `mcr.shrink`, `mcr.reconfigure`: a program that goes on when ranks are lost or join."""
