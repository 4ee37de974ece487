"""The arithmetic under the models: reference (torch, the truth) and one table that picks."""
