"""The scripts of training/ import their neighbours by name."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent.parent / "training"
if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))
