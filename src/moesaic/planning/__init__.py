"""From a job and a machine to the settings of a worker whose model is larger than its fast memory."""

from moesaic.planning.plan import Planned, longest_request, plan
from moesaic.planning.search import USABLE, Job

__all__ = ["USABLE", "Job", "Planned", "longest_request", "plan"]
