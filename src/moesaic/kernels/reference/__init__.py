"""Kernels in torch: the reference that faster ones are tested against."""
