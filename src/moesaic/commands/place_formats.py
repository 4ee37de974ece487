"""Files of placements in the forms of moesaic and of other engines, for `moesaic place`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from moesaic.core.coclusters import Coclusters
from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile
from moesaic.core.tables import Tables
from moesaic.policy.placement.locality import homes_in
from moesaic.policy.placement.physical_map import from_physical_map, to_physical_map
from moesaic.policy.placement.solvers.tokens import label_tokens

SGLANG_FIELD = "physical_to_logical_map"


def save(placement: Placement, tables: Tables | None, path: Path) -> None:
    """Write the placement, and next to it the tables that it names. Writes both files or neither.

    Raises ConfigError if they cannot be written.
    """
    text = placement.to_json()
    writers: dict[Path, Callable[[Path], object]] = {}
    if tables is not None:
        writers[path.with_name(placement.tables)] = tables.save
    # The placement is renamed last: once it is there, the tables that it names are there, too.
    _write_together(writers | {path: lambda file: file.write_text(text, encoding="utf-8")})


def save_for_sglang(placement: Placement, ranks: int, path: Path) -> None:
    """Write the placement as SGLang takes it. Raises ConfigError if it cannot be written or taken."""
    text = sglang_text(placement, ranks)
    _write_together({path: lambda file: file.write_text(text, encoding="utf-8")})


def _write_together(writers: Mapping[Path, Callable[[Path], object]]) -> None:
    new_files = {path: path.with_name(f"{path.name}.new") for path in writers}
    try:
        for path, write in writers.items():
            write(new_files[path])
        for path, new_file in new_files.items():
            new_file.replace(path)
    except OSError as error:
        allowed_values = f"a file to write into ({error.strerror})"
        raise ConfigError.field("--output-file", str(path), allowed_values) from error
    finally:
        for new_file in new_files.values():
            new_file.unlink(missing_ok=True)


def sglang_text(placement: Placement, ranks: int) -> str:
    """The file for SGLang's --init-expert-location, with a line for each layer.

    SGLang passes every field of the file on as an argument, so there is no other one. Raises ConfigError if
    the ranks have different numbers of experts.
    """
    rows = ",\n".join(json.dumps(row) for row in to_physical_map(placement, ranks))
    return f'{{"{SGLANG_FIELD}": [\n{rows}\n]}}\n'


def read_engine_map(path: Path, profile: Profile, ranks: int) -> Placement:
    """The placement in a file of --from: SGLang's map (.json or .pt), or a placement of moesaic.

    Raises ConfigError for a file that has neither, or that is of other layers or experts than the profile.
    """
    data = _read(path)
    if isinstance(data, dict) and SGLANG_FIELD in data:
        rows, field = data[SGLANG_FIELD], f"--from {path}: {SGLANG_FIELD}"
        rows = rows.tolist() if hasattr(rows, "tolist") else rows
        return from_physical_map(rows, profile.layers, profile.num_experts, ranks, profile.model, field)
    if isinstance(data, dict) and "schema" in data:
        placement = Placement.read(str(path), ranks)
        placement.check(profile.model, profile.layers, profile.num_experts)
        return placement
    got = sorted(map(str, data)) if isinstance(data, dict) else type(data).__name__
    raise ConfigError.field(f"--from {path}", got, f"a placement, or SGLang's {SGLANG_FIELD}")


def _read(path: Path) -> object:
    if path.suffix == ".pt":
        from moesaic.jobs.profiling.sglang_files import load_dictionary

        return load_dictionary(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError.field("--from", str(path), f"a file to read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--from {path}: not JSON: {error}") from error


def clusters_of(profile: Profile, placement: Placement, ranks: int) -> Coclusters:
    """The clusters that fit a placement: each token id is on the rank that has most of its choices.

    A choice of an expert with copies counts for the rank of the first one.
    """
    first_copies = homes_in(placement, profile.layers)[:, :, 0]
    return replace(label_tokens(profile, first_copies), ranks=ranks)
