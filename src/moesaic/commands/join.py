"""`moesaic join`: a process of this host becomes a part of a running cluster.

Question: What does SIGTERM do to `moesaic join`?
"""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path

from moesaic.cluster.joining import child, enlisting, server
from moesaic.cluster.joining.loop import join
from moesaic.cluster.joining.options import JoinOptions
from moesaic.commands import descriptors
from moesaic.commands.options import Join
from moesaic.core.errors import ConnectionLost
from moesaic.models import files
from moesaic.trace import logs
from moesaic.transport.secret import read_secret


def run(options: Join, as_json: bool) -> int:
    """Serve until the cluster removes this process, or until SIGTERM or Ctrl-C. Returns the exit code.

    SIGTERM ends it at once with code 0, also as the first process of a container, which the kernel does not
    end by itself.
    """

    def stop(signum: int, frame: object) -> None:
        raise SystemExit(0)

    def on_joined(model: str) -> None:
        if as_json:
            fields = {"cluster": options.address, "role": options.role, "model": model}
            print(json.dumps({"event": "joined", **fields}), flush=True)
        else:
            print(f"Joined {options.address} as {options.role}: {model}", flush=True)

    def on_lost(error: ConnectionLost) -> None:
        if as_json:
            print(json.dumps({"event": "lost", "cluster": options.address, "why": str(error)}), flush=True)
        else:
            print(f"{error}; joining again", flush=True)

    signal.signal(signal.SIGTERM, stop)
    logs.set_up(options.role.replace("-", " "), options.log_level)
    descriptors.prepare()
    secret = read_secret(Path(options.secret_file), "--secret-file")
    model = options.model
    if model is not None and options.hf_overrides is not None:
        model = str(files.resolve(model, None, options.hf_overrides))
    joining = JoinOptions(
        ",".join(f"tcp:{address.strip()}" for address in options.address.split(",")),
        options.role,
        None if options.listen is None else f"tcp:{options.listen}",
        model,
        options.threads,
        options.kernels,
        options.device,
        options.capacity,
        log_level=options.log_level,
    )
    enlisting.check_addresses(joining)
    if options.role == "expert-server":
        return join(partial(server.serve_with_kept_experts(), joining, secret), on_joined, on_lost)
    with child.KeptChild() as serve_once:
        return join(partial(serve_once, joining, secret), on_joined, on_lost)
