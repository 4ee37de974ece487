"""The parts of collectives.py."""
