"""Requests of kernels to expert servers of any host, through NVSHMEM."""
