"""The GPU tests, and those of the Triton kernels."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from scripts.gpu.plan import ROOT, UNTESTED, Found, Work, problem, several

EACH, REPORTING = 60, 20
"""Seconds of a case, and those of them that pytest may take besides its tests: to start, and to report."""
INTERRUPTED = 2
"""Exit code of pytest when it was interrupted."""


def cases(work: Work) -> Sequence[str]:
    """The files and folders that pytest is given, each by itself."""
    return list(work.tests)


def left_out(work: Work, case: str) -> list[str]:
    """Options of pytest that leave out the other cases which lie in the folder of this case, and UNTESTED."""
    others = [path for path in (*work.tests, *UNTESTED) if path != case]
    return [f"--ignore={path}" for path in others if Path(path).is_relative_to(case)]


def run(work: Work, case: str) -> Found:
    """The counts of pytest's results, and the tests that failed with the line that says why."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        seconds = EACH - REPORTING
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", f"--session-timeout={seconds}"]
        command = [sys.executable, "-m", "pytest", *options, "-m", "not full"]
        command += ["-n", str(several()), "--dist", "worksteal", *left_out(work, case), case]
        done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr)
        if not report.exists():
            return problem(f"pytest ended with exit code {done.returncode} and wrote no report")
        [suite] = ET.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = {}
    for one in suite.iter("testcase"):
        for child in one:
            if child.tag in ("failure", "error"):
                failed[f"{one.get('classname')}.{one.get('name')}"] = (child.get("message") or "")[:300]
    found: Found = {"ok": done.returncode == 0, **counts, "failed": failed}
    early = done.returncode == INTERRUPTED
    return found | problem(f"pytest did not reach the last test within {seconds} s") if early else found
