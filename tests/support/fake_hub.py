"""A Hugging Face hub on a loopback port: one repository, the endpoints that a download needs."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

COMMIT = "c0ffee" + "0" * 34
PIECE = 1 << 16
"""Bytes that are written at once, so that a client which closes its connection is noticed."""


class Handler(BaseHTTPRequestHandler):
    """Serves `files` of `repository`. Records every request in `seen`, and bytes of each file in `sent`."""

    repository: str
    files: Path
    seen: list[str]
    sent: Counter[str]
    faults: Mapping[str, str]
    """Name of a file -> what is wrong with it: see `_part`."""

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
        name = "/".join(parts[parts.index("resolve") + 2 :]) if "resolve" in parts else parts[-1]
        file = self.files / name
        if not file.is_file():
            return self._fail(404, "EntryNotFound")
        wanted = self.headers.get("Range")
        if wanted is None:
            return self._answer(file.read_bytes(), body)
        return self._part(file, name, self.faults.get(name, ""), wanted)

    def _part(self, file: Path, name: str, fault: str, wanted: str) -> None:
        """Answers a request for a range, wrongly if the file has a fault."""
        if fault in ("EntryNotFound", "GatedRepo", "RepoNotFound"):
            return self._fail(404 if fault == "EntryNotFound" else 401, fault)
        if fault == "redirect" and "/cdn/" not in self.path:
            self.send_response(302)
            self.send_header("Location", f"/cdn{self.path}?signed=1")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        range_ = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
        assert range_ is not None
        size = file.stat().st_size
        begin, end = int(range_[1]), min(int(range_[2]) + 1, size)
        if not size:
            self.send_response(416)
            self.send_header("Content-Range", "bytes */0")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if fault == "no ranges":
            begin, end = 0, size
        if fault == "another range":
            begin, end = begin + 1, end + 1
        size += begin if fault == "grows" else 0
        self.send_response(200 if fault == "no ranges" else 206)
        if fault != "no ranges":
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        if fault == "endless":
            end = size
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        with file.open("rb") as opened:
            opened.seek(begin)
            while begin < end:
                piece = opened.read(min(PIECE, end - begin))
                try:
                    self.wfile.write(piece)
                except ConnectionError:
                    return None
                begin += len(piece)
                self.sent[name] += len(piece)
        return None

    def _listing(self, tree: bool) -> Any:
        files = (file for file in sorted(self.files.rglob("*")) if file.is_file())
        sizes = {str(file.relative_to(self.files)): file.stat().st_size for file in files}
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
def hub(
    repository: str, files: Path, sent: Counter[str] | None = None, **faults: str
) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub with one repository, and the requests it has seen.

    sent: gets the bytes of each file that were asked for in ranges. faults: name of a file -> what is wrong
    with answers to such requests (see `Handler._part`).
    """
    seen: list[str] = []
    told = {"sent": Counter() if sent is None else sent, "faults": faults}
    handler = type("Hub", (Handler,), {"repository": repository, "files": files, "seen": seen, **told})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
