"""Finds the settings of a worker with a model larger than its fast memory, from a job and a machine."""

from moesaic.planning.plan import Planned, longest_request, plan
from moesaic.planning.search import USABLE, Job

__all__ = ["USABLE", "Job", "Planned", "longest_request", "plan"]
