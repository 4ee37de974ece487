"""A step through the model: run operation by operation, replayed from a recording, or run by segments."""
