"""Plain data for all other folders: kinds, messages, groups, units, the environment."""
