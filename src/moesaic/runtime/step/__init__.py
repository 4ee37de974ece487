"""One step through the model: run operation by operation, replayed from a recording, or layer by layer."""
