"""Runs models larger than the fast memory: task lists on lanes."""
