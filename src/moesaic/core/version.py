"""The version of moesaic. Processes of a cluster say it to each other."""

__version__ = "0.3.0"
