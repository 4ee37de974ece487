"""The decisions: events and `now` in, actions out.

No torch, no clock, no I/O, no threads, no global randomness.
"""
