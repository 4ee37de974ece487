"""Writes tests/support/kubernetes_schemas.json, by which tests check deploy/kubernetes.

    pip download --no-deps kubernetes-validate    # some 22 MB, which is why it is no dependency of the tests
    python scripts/kubernetes_schemas.py kubernetes_validate-1.37.0-py3-none-any.whl

The wheel has the schemas of Kubernetes' OpenAPI for each version, without unknown fields. What the kinds of
deploy/kubernetes use of the newest version is kept, without descriptions.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent.parent / "tests" / "support" / "kubernetes_schemas.json"
KINDS = {
    "PersistentVolumeClaim": "io.k8s.api.core.v1.PersistentVolumeClaim",
    "PodDisruptionBudget": "io.k8s.api.policy.v1.PodDisruptionBudget",
    "Secret": "io.k8s.api.core.v1.Secret",
    "Service": "io.k8s.api.core.v1.Service",
    "StatefulSet": "io.k8s.api.apps.v1.StatefulSet",
}
_DEFINITIONS = re.compile(r".*/v1\.(\d+)\.\d+-local-strict/_definitions\.json")


def main(wheel: str) -> int:
    with zipfile.ZipFile(wheel) as archive:
        versions = {
            int(found[1]): found[0] for found in map(_DEFINITIONS.fullmatch, archive.namelist()) if found
        }
        newest = max(versions)
        known = json.loads(archive.read(versions[newest]))["$defs"]
    kept: dict[str, Any] = {}
    waiting = list(KINDS.values())
    while waiting:
        name = waiting.pop()
        if name not in kept:
            kept[name] = trimmed(known[name])
            waiting += references(known[name])
    source = (
        f"Kubernetes 1.{newest}, Copyright The Kubernetes Authors, Apache License 2.0; by {Path(wheel).name}"
    )
    head = {"source": source, "kinds": KINDS}
    lines = [f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept)]
    FILE.write_text(json.dumps(head)[:-1] + ', "$defs": {\n' + ",\n".join(lines) + "\n}}\n")
    return 0


def trimmed(schema: Any) -> Any:
    """A schema without descriptions, whose references are those of one file."""
    if isinstance(schema, list):
        return [trimmed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: one for name, one in schema.items() if not (name == "description" and isinstance(one, str))}
    return {
        name: f"#/$defs/{one.rpartition('/')[2]}" if name == "$ref" else trimmed(one)
        for name, one in kept.items()
        if not name.startswith("x-")
    }


def references(schema: Any) -> Iterator[str]:
    """The names of the definitions that a schema refers to."""
    if isinstance(schema, list):
        for one in schema:
            yield from references(one)
    elif isinstance(schema, dict):
        for name, one in schema.items():
            if name == "$ref":
                yield one.rpartition("/")[2]
            else:
                yield from references(one)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
