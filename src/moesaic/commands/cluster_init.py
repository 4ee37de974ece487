"""`moesaic cluster init`: makes the secret of a cluster, and says which commands use it.

Question: Who makes the secret of a cluster, and who may read its file?
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from moesaic.commands.options import InitCluster
from moesaic.core.errors import ConfigError
from moesaic.core.home import expand_home
from moesaic.transport.secret import write_new_secret

ADDRESS = "HOST:7000"
"""Where the commands expect the cluster. HOST is for the reader to replace."""


def run(options: InitCluster, as_json: bool) -> int:
    """Write the secret and print the commands that start a cluster with it. Returns the exit code.

    Raises ConfigError for a file that exists or cannot be written.
    """
    file = expand_home(options.file)
    try:
        write_new_secret(file)
    except FileExistsError as error:
        raise ConfigError.field("FILE", str(file), "a new file, since a secret is never replaced") from error
    except OSError as error:
        raise ConfigError(f"FILE: {file}: {error.strerror}") from error
    serve, join = commands(file)
    if as_json:
        print(json.dumps({"file": str(file), "serve": serve, "join": join}))
    else:
        print(f"Wrote the secret to {file} with mode 600. Start the cluster on this host:")
        print(f"  {serve}")
        print(
            "Copy the file to every other host, with mode 600 and by a safe way such as scp -p. Start there:"
        )
        print(f"  {join}")
        print("HOST is this host's name or address, as the other hosts reach it.")
    return 0


def commands(file: Path) -> tuple[str, str]:
    """The command lines of the first host and of each other host."""
    name = shlex.quote(str(file))
    serve = "moesaic serve MODEL --attention-workers 1 --expert-servers 1"
    return (
        f"{serve} --cluster-address tcp:{ADDRESS} --cluster-secret-file {name}",
        f"moesaic join {ADDRESS} --role expert-server --secret-file {name}",
    )
