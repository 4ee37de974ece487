"""Compares a model with transformers, one layer at a time."""
