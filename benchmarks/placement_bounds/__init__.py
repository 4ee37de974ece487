"""How local a placement can get at most: an upper bound for real layers, and the optimum of small ones."""
