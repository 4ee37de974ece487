"""Solvers that place experts and tokens together."""
