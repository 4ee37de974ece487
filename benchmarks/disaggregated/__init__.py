"""The parts of `disaggregation.py`."""
