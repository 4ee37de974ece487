"""Torch kernels: the truth that faster ones are tested against."""
