"""Seeded rounds of real clusters under traffic with real faults; answers are compared with one process."""
