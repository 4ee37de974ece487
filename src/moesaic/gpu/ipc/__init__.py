"""Rows that stay on GPUs of several processes: CUDA IPC memory and the calls over it."""
