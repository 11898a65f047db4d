"""Public functions: collectives, their differentiable forms, and the saved state of stages."""
