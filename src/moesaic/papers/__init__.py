"""Computes published results again, for `moesaic plan --paper`. Nothing else in moesaic uses this package."""
