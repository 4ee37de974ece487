"""`moesaic compress`: compresses a checkpoint, with progress, and prints the size before and after."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

from rich.console import Console

from moesaic.commands.options import Compress
from moesaic.commands.progress import progress
from moesaic.commands.units import in_bytes
from moesaic.core.errors import ConfigError
from moesaic.models.compressing import compress
from moesaic.models.files import refuse_gguf, resolve
from moesaic.runtime.machine import cores

MB = 10**6


def run(options: Compress, as_json: bool) -> int:
    """Write the compressed checkpoint and print its size. Returns the exit code.

    Raises ConfigError for a checkpoint that cannot be compressed and files that cannot be read or written.
    """
    start = time.monotonic()
    path = resolve(options.model, options.revision, options.hf_overrides)
    refuse_gguf(path, "compress")
    try:
        with progress(Console(stderr=True), time.monotonic, "MB/s") as show:
            sizes = compress(
                path,
                options.target,
                cores(),
                lambda num_done, total: show("compressing", num_done // MB, total // MB),
            )
    except OSError as error:
        raise ConfigError(f"{error.filename or options.target}: {error.strerror}") from error
    seconds = time.monotonic() - start
    if as_json:
        report = {"model": options.model, "directory": str(options.directory), **asdict(sizes)}
        print(json.dumps({**report, "share": sizes.share, "seconds": round(seconds, 3)}))
    else:
        print(
            f"{options.directory}: {in_bytes(sizes.bytes_after)} of {in_bytes(sizes.bytes_before)} "
            f"({sizes.share:.1%}), {sizes.matrices} matrices compressed in {seconds:.1f} s"
        )
    if sizes.share <= 1:
        return 0
    larger = f"{options.directory} is larger than {options.model}, whose experts cannot be compressed so"
    print(f"moesaic: {larger}; serve {options.model} itself", file=sys.stderr)
    return 1
