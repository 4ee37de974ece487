"""python -m tests.support.huge_configs PATH: loads a checkpoint with each wrong value of each key.

It prints the cases that were not refused in one line, as JSON. Its memory is limited to what a first load
took and SPARE more, so whatever allocates by a number of the config fails here.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

from moesaic import LLM
from moesaic.core.errors import MoesaicError

SPARE = 200 << 20
HUGE = (10**9, 2**31, 10**12, 10**400, 1e300, float("inf"), -(10**9))


def load(path: Path) -> None:
    LLM(str(path), kv_cache_memory="1MiB")


def broken_by(path: Path, config: dict[str, Any]) -> str | None:
    """How loading the checkpoint with this config went wrong, other than by a refusal in one line."""
    (path / "config.json").write_text(json.dumps(config))
    try:
        load(path)
    except MoesaicError as error:
        text = str(error)
        return text if "\n" in text or len(text) > 500 else None
    except BaseException as error:
        return repr(error)
    return None


def names_of(config: dict[str, Any]) -> list[str]:
    """Every key whose value is a number, also those within an object, and keys that have defaults."""
    own = [name for name, value in config.items() if type(value) in (int, float) or value is None]
    rope = [f"rope_parameters.{name}" for name in config.get("rope_parameters") or {}]
    return sorted({*own, *rope, "head_dim", "sliding_window", "decoder_sparse_step", "rope_theta"})


def changed(config: dict[str, Any], name: str, value: object) -> dict[str, Any]:
    """`config` with another value of a key, `rope_parameters.factor` being one within another."""
    first, _, second = name.partition(".")
    return {**config, first: {**config[first], second: value} if second else value}


def main(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    load(path)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + SPARE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    wrong = {}
    for name in names_of(config):
        for value in HUGE:
            how = broken_by(path, changed(config, name, value))
            if how is not None:
                wrong[f"{name}={value!r:.30}"] = how
    sys.stdout.write(json.dumps(wrong))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
