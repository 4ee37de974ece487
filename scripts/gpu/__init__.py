"""Measures moesaic on a GPU: one command, one JSON file, less than ten minutes."""
