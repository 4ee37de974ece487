"""The process that solves a placement from live routing, and the files by which it is asked."""
