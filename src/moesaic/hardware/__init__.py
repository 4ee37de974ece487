"""Measurements of this machine by microbenchmarks: memory, disk, link and products. The pipeline itself
never runs."""
