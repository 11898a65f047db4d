"""Training with outer steps: ranks train alone, and average what they have learned every so many steps."""
