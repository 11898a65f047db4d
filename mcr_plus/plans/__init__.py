"""Plans of whole models: profiles of their blocks."""
