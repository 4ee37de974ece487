"""Kernels for CUDA in Triton, one file an operation. They run on CPUs only in Triton's interpreter."""
