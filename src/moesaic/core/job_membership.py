"""What a process remembers of a job of GPUs that it was told to join."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class JobMembership:
    """A process can be in one job only, also where it joins another cluster later."""

    was_told: bool = False
    """Whether this process was told to join a job."""
