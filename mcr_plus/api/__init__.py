"""The functions that a program calls: collectives, autograd, records, explanations, state."""
