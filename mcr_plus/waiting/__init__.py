"""How a waiting thread spends its time: spinning, yielding, sleeping until a peer wakes it."""
