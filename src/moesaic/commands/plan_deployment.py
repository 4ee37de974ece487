"""`moesaic plan --cluster`: searches deployments in virtual time, and prints commands that start the best."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

from moesaic.commands import plan_deployment_report as reports
from moesaic.commands.plan_options import Plan
from moesaic.commands.progress import progress
from moesaic.core.errors import ConfigError
from moesaic.cost.sizes import ModelSizes
from moesaic.planning.deployment import demand, spec
from moesaic.planning.deployment.search import Deployments, Search

Clock = Callable[[], float]


def run(
    options: Plan, find_model: Callable[[str], ModelSizes], json: bool, clock: Clock = time.monotonic
) -> int:
    """Search, and print the best deployments. Returns the exit code.

    Raises ConfigError for a wrong field, for a model that does not fit, and if the time is too short.
    """
    plan = search(options, find_model, clock)
    print(reports.as_json(plan, options) if json else reports.as_text(plan, options))
    return 0


def search(options: Plan, find_model: Callable[[str], ModelSizes], clock: Clock) -> Deployments:
    """The best deployments for these settings."""
    assert options.model is not None and options.cluster is not None and options.workload is not None
    machines, requests = spec.load(options.cluster), demand.load(options.workload)
    objectives = demand.parse_objectives(options.slo)
    model = find_model(options.model)
    if not model.moe_layers:
        raise ConfigError.field("MODEL", options.model, "a model with routed experts")
    with progress(Console(stderr=True), clock, "per s") as show:
        return Search(
            model, machines, requests, objectives, options.time_budget, options.seed, clock, show
        ).run()
