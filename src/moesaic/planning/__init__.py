"""Finds the settings of a worker with a model larger than its fast memory, from a job and a machine."""

from moesaic.planning.plan import WorkerPlan, longest_request, plan
from moesaic.planning.search import USABLE, Job

__all__ = ["USABLE", "Job", "WorkerPlan", "longest_request", "plan"]
