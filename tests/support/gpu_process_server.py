"""`python -m tests.support.gpu_process_server`: an expert server that `gpu_process` has started."""

from __future__ import annotations

from unittest.mock import patch

from tests.support.gpu_process import take_device


def main() -> int:
    """Returns the exit code."""
    take_device()
    from moesaic.experts import __main__ as server
    from moesaic.experts import process
    from tests.support.gpu_sanitizer import in_thread

    run = process._ExpertLoader._run

    def load(loader: process._ExpertLoader) -> None:
        with in_thread():
            run(loader)

    with patch.object(process._ExpertLoader, "_run", load):
        return server.main()


if __name__ == "__main__":
    raise SystemExit(main())
