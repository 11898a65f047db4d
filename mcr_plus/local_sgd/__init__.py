"""Local SGD: ranks train alone, and average their progress every `every` steps (`mcr.local`)."""
