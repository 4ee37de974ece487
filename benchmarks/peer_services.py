"""One engine of `before_after.py`: an attention worker and an expert server of one tree of moesaic.

Arguments: the tree, the model and the threads of each process. Speaks JSON lines, as `peer_moesaic.py` does.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from protocol import Answer, Order, private_stdout, serve, timed

SCHEDULE = {"schedule": "lockstep"}


def run(served: Any, tokens: dict[int, list[int]], prompts: list[list[int]], new: int) -> Answer:
    """Prefill all prompts, then decode `new` tokens of each; seconds of both, and the tokens."""
    tokens.clear()
    times = served.run(prompts, new).times
    prefilled, ended = max(moments[0] for moments in times), max(moments[-1] for moments in times)
    return timed(0.0, prefilled, ended, [tokens[number] for number in sorted(tokens)])


def main() -> None:
    answers = private_stdout()
    tree, model, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    sys.path.insert(0, str(tree / "benchmarks"))  # the driver of the same tree, whose package is imported
    serving = importlib.import_module("disaggregated.serving")
    config = importlib.import_module("moesaic.config")
    cluster = config.ClusterConfig(expert_servers=1, rebalance_interval=0)
    tokens: dict[int, list[int]] = {}
    with serving.serving("services", model, threads, cluster, **SCHEDULE) as served:
        receive = served.launched.engine.receive

        def keep_tokens(message: Any) -> Any:
            outputs = receive(message)
            for output in outputs:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
            return outputs

        served.launched.engine.receive = keep_tokens

        def obey(order: Order) -> Answer:
            return run(served, tokens, order["prompts"], order["new"])

        serve(answers, obey)


if __name__ == "__main__":
    main()
