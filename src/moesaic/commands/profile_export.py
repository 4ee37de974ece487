"""`moesaic profile export`: writes a profile's hot experts in the forms that other engines take."""

from __future__ import annotations

import json

from moesaic.commands.options import ExportProfile
from moesaic.commands.writable import require_writable
from moesaic.core.profile import Profile
from moesaic.jobs.profiling import exporting


def run(options: ExportProfile, as_json: bool) -> int:
    """Write the file, and print what is in it. Returns the exit code."""
    require_writable("--output-file", options.output_file)
    profile = Profile.load(options.file)
    if options.model is None:
        count = exporting.write_trace(profile, options.output_file)
        text = f"wrote {options.output_file}: {count} lines, for --moe-cache-profile of the fork of llama.cpp"
    else:
        count = exporting.write_hot_experts(profile, options.model, options.output_file)
        text = f"wrote {options.output_file}: {count} layers, for moesaic serve --hot-experts"
    report = {"profile": str(options.file), "form": options.form, "output": str(options.output_file)}
    print(json.dumps(report | {"lines" if options.model is None else "layers": count}) if as_json else text)
    return 0
