"""Plain data that every other folder uses: kinds, messages, groups, units, the environment."""
