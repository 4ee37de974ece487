"""How long the parts of a change of the cluster may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScalingLimits:
    """How long each part of a change may take."""

    hosts: float = 600.0
    """Seconds that a new process waits for a host."""
    loading: float = 900.0
    """Seconds until a new process serves."""
    taking: float = 900.0
    """Seconds until servers have loaded the experts that they get."""
    connecting: float = 2.0
    """Seconds that clients have to connect to a new server before it gets experts."""
    draining: float = 30.0
    """Seconds that an attention worker has to finish its requests. The remaining ones move to other
    workers."""
    nudge: float = 1.0
    """Seconds between two reminders to workers that still wait for late answers."""
    attempts: int = 3
    """Number of deaths after which a new process is given up."""
