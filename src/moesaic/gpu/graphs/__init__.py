"""Decode steps recorded as CUDA graphs."""
