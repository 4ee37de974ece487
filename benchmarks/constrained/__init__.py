"""The questions of structured.py."""
