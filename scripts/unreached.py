"""Lists the modules of the package that no command and no public name reaches.

    python -m scripts.unreached

`tests/test_architecture.py` keeps the list empty.
"""

from __future__ import annotations

from tests.support import architecture_rules as rules
from tests.test_architecture import MODULES, PUBLIC


def main() -> int:
    found = rules.unreached(MODULES, PUBLIC)
    print("\n".join(found) or "every module is reached")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
