"""A Hugging Face hub on a loopback port: one repository, the endpoints that a download needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

COMMIT = "c0ffee" + "0" * 34


class Handler(BaseHTTPRequestHandler):
    """Serves `files` of `repository` and records every request in `seen`."""

    repository: str
    files: Path
    seen: list[str]

    def do_HEAD(self) -> None:
        self._serve(body=False)

    def do_GET(self) -> None:
        self._serve(body=True)

    def _serve(self, body: bool) -> None:
        path = urlsplit(self.path).path
        self.seen.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        if f"/{self.repository}" not in path:
            return self._fail(404, "RepoNotFound")
        if parts[:2] == ["api", "models"]:
            if len(parts) > 5 and parts[4] == "revision" and parts[5] not in ("main", COMMIT):
                return self._fail(404, "RevisionNotFound")
            return self._answer(json.dumps(self._listing(tree="tree" in parts)).encode(), body)
        file = self.files / parts[-1]
        return self._answer(file.read_bytes(), body) if file.is_file() else self._fail(404, "EntryNotFound")

    def _listing(self, tree: bool) -> Any:
        sizes = {file.name: file.stat().st_size for file in sorted(self.files.iterdir())}
        if tree:
            return [
                {"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in sizes.items()
            ]
        siblings = [{"rfilename": name} for name in sizes]
        return {"id": self.repository, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}

    def _answer(self, content: bytes, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Logs nothing."""


@contextmanager
def hub(repository: str, files: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub with one repository, and the requests it has seen."""
    seen: list[str] = []
    handler = type("Hub", (Handler,), {"repository": repository, "files": files, "seen": seen})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
