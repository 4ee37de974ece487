"""Runs models that are larger than the fast memory: lists of tasks on parallel lanes."""
