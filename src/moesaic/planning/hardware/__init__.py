"""Measures this machine by microbenchmarks: memory, disk, link and matrix products. No model runs."""
