"""Writes the table of generic keys of config.json: those of every model in transformers, and their defaults.

    python scripts/generic_keys.py

It writes the half of the transformers that runs it, and leaves the other half as it is. So a new table takes
two runs: one with the project's own transformers, and one in an environment with transformers 4.57, which
needs no torch. The table is read by src/moesaic/models/known_keys.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent.parent / "src" / "moesaic" / "models" / "generic_keys.json"
SPECIFIC = ("model_type", "tie_word_embeddings", "transformers_version")
"""Keys of every config whose value says something about a model, or about the program that wrote it."""


def read_defaults() -> tuple[str, dict[str, Any]]:
    """Returns the version of the installed transformers, such as 5.23, and the defaults of generic keys."""
    import transformers

    written = transformers.PretrainedConfig().to_json_string(use_diff=False)
    defaults = {key: value for key, value in json.loads(written).items() if key not in SPECIFIC}
    return ".".join(transformers.__version__.split(".")[:2]), defaults


def main() -> None:
    """Write this version's half of the table."""
    version, defaults = read_defaults()
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    TABLE.write_text(json.dumps(table | {version: defaults}, indent=1, sort_keys=True) + "\n")
    print(f"{TABLE}: {len(defaults)} keys of transformers {version}")


if __name__ == "__main__":
    main()
