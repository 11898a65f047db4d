"""Local SGD: ranks train separately, and average their progress every `every` steps (`mcr.local`)."""
