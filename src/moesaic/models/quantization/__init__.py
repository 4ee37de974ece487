"""Quantised checkpoints of other programs: a file for each scheme, all into types of core/stored.py."""
