"""Decides which processes serve: which replica computes an expert, and how many expert servers run."""
