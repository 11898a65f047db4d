"""Measure operations, for tuning tables (`mcr-plus tune`) and for people (`mcr-plus bench`)."""
