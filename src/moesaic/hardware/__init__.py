"""This machine, measured by microbenchmarks that never run the pipeline: memory, disk, link and products."""
