"""`moesaic profile export`: writes a profile's hot experts for engines with expert caches."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from moesaic.core import hot_counts
from moesaic.core.errors import ConfigError
from moesaic.core.placement import refuse_model
from moesaic.core.profile import Profile
from moesaic.jobs.profiling.llama_traces import trace_lines
from moesaic.models import files
from moesaic.models.fingerprint import origin
from moesaic.models.registry import routed_model


def write_trace(profile: Profile, output: Path) -> int:
    """Write the routes of the profile's requests as a trace. Returns the number of lines."""
    return _write(trace_lines(profile), output)


def write_hot_experts(profile: Profile, model: str, output: Path) -> int:
    """Write how often each expert was chosen. model: as on a command line. Returns the number of layers.

    Raises ConfigError if the profile is of another model.
    """
    path = files.resolve(model, None, None)
    refuse_model("model", profile.model, routed_model(path).model)
    counts = dict(zip(profile.layers, profile.loads.tolist(), strict=True))
    _write([hot_counts.to_text(origin(path), counts)], output)
    return len(counts)


def _write(parts: Iterable[str], output: Path) -> int:
    """Write the parts in one step, so that no half of a file stays. Returns how many there were."""
    new_file = output.with_name(f"{output.name}.new")
    count = 0
    try:
        with new_file.open("w", encoding="utf-8") as file:
            for part in parts:
                file.write(part)
                count += 1
        new_file.replace(output)
    except OSError as error:
        allowed_values = f"a file to write into ({error.strerror})"
        raise ConfigError.field("--output-file", str(output), allowed_values) from error
    finally:
        new_file.unlink(missing_ok=True)
    return count
