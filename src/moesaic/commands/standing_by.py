"""What `moesaic serve --standby-for` does until the other one is gone."""

from __future__ import annotations

import importlib
import json
from contextlib import closing
from pathlib import Path

from moesaic.cluster.joining import standby
from moesaic.cluster.launch import check
from moesaic.config import ClusterConfig, ServerConfig, WorkerConfig
from moesaic.server.listener import bind
from moesaic.text.tokenizer import Tokenizer
from moesaic.trace.options import RecordConfig
from moesaic.transport.secret import read_secret

SLOW_IMPORTS = ("moesaic.server.app", "moesaic.server.run", "moesaic.server.async_engine")


def stand_by(
    config: WorkerConfig, cluster: ClusterConfig, server: ServerConfig, record: RecordConfig, as_json: bool
) -> None:
    """Prepares what can be prepared, and returns when it is time to serve.

    The port is not opened, so clients and load balancers see that nobody serves here. Raises ConfigError for
    what would fail later: settings that a standby has not, an address that is used, a checkpoint or a secret
    that is not there.
    """
    assert cluster.standby_for is not None and cluster.cluster_address is not None
    path = check(config, cluster.resolved(), record)
    secret = read_secret(Path(cluster.cluster_secret_file or ""), "--cluster-secret-file")
    with closing(bind(server.host, server.port)):
        pass
    weights = standby.prepare(cluster.standby_for, cluster.cluster_address, path)
    template = Path(server.chat_template) if server.chat_template else None
    Tokenizer(path, template, special_tokens_in_content=server.allow_special_tokens_in_content).close()
    for name in SLOW_IMPORTS:
        importlib.import_module(name)

    def say(text: str) -> None:
        print(json.dumps({"event": "standby", "what": text}) if as_json else text, flush=True)

    standby.watch(cluster.standby_for, secret, weights, say)
