"""`moesaic join`: this process becomes an expert server of a running cluster."""

from __future__ import annotations

import json
import os
from pathlib import Path

from moesaic import logs
from moesaic.commands import descriptors
from moesaic.commands.options import Join
from moesaic.core.errors import ConnectionLost
from moesaic.core.messages import Enlisted
from moesaic.experts.join import JoinOptions, join
from moesaic.transport.secret import read_secret


def run(options: Join, as_json: bool) -> int:
    """Serve until the cluster removes this server, or until Ctrl-C. Returns the exit code."""

    def joined(enlisted: Enlisted) -> None:
        layout = enlisted.layout
        if as_json:
            print(
                json.dumps({"event": "joined", "cluster": options.address, "model": enlisted.model}),
                flush=True,
            )
            return
        sizes = f"{layout.num_experts} experts in {len(layout.layers)} layers"
        print(f"Joined {options.address}: {enlisted.model}, {sizes}", flush=True)

    def lost(error: ConnectionLost) -> None:
        if as_json:
            print(json.dumps({"event": "lost", "cluster": options.address, "why": str(error)}), flush=True)
        else:
            print(f"{error}; joining again", flush=True)

    logs.set_up("expert server", options.log_level)
    descriptors.prepare()
    secret = read_secret(Path(options.secret_file), "--secret-file")
    threads = options.threads or len(os.sched_getaffinity(0))
    model = None if options.model is None else Path(options.model)
    listen = None if options.listen is None else f"tcp:{options.listen}"
    capacity = options.capacity or float(threads)
    joining = JoinOptions(f"tcp:{options.address}", secret, listen, model, threads, options.kernels, capacity)
    return join(joining, joined, lost)
