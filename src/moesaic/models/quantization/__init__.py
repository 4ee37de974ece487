"""Quantised checkpoints of other programs: a file for each scheme, all into types of core/weight_types.py."""
