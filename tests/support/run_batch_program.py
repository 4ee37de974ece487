"""`run-batch` as a process of its own, so that it can be killed: python run_batch_program.py JSON"""

from __future__ import annotations

import json
import math
import resource
import sys
from pathlib import Path

from rich.console import Console

from moesaic.config import ModelConfig, WorkerConfig
from moesaic.core.errors import ConfigError, MoesaicError
from moesaic.jobs.batch.options import RunBatch
from moesaic.jobs.batch.run import run, run_with
from moesaic.jobs.batch.show import print_summary
from tests.support.fake_batch_server import FakeServer


def main(settings: str) -> int:
    given = json.loads(settings)
    if "max_file_bytes" in given:
        resource.setrlimit(resource.RLIMIT_FSIZE, (given["max_file_bytes"],) * 2)
    try:
        options = RunBatch(Path(given["input"]), Path(given["output"]), max_in_flight=given.get("window"))
        if given.get("demo"):
            summary = run(options, WorkerConfig(ModelConfig("demo", threads=1)))
        else:
            fake = FakeServer(delay=given.get("delay", 0.0), most=given.get("most", math.inf))
            summary = run_with(fake.serving(), "fake", options, given.get("window", 4))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except MoesaicError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    print_summary(summary, Console())
    return summary.exit_code()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
