"""GET /: the page with a chat and a live view. Its files are in the folder `page` and need no other host.

Question: What serves the page at `/`?
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import FileResponse

FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def _files() -> dict[str, Path]:
    """Path of a request -> file, for the files that are there at the start."""
    # Only these paths are served, so that no request can leave the folder.
    all_files = {f"/page/{file.relative_to(FOLDER).as_posix()}": file for file in sorted(FOLDER.rglob("*"))}
    files = {path: file for path, file in all_files.items() if file.suffix in _TYPES}
    files["/"] = files.pop("/page/index.html")
    return files


FILES = _files()
PATHS = frozenset(FILES)
"""All paths of the page. They need no key: the files are the same for everybody."""

router = APIRouter()


async def page_file(request: Request) -> FileResponse:
    """A file of the page."""
    file = FILES[request.url.path]
    return FileResponse(file, media_type=_TYPES[file.suffix], headers=HEADERS)


for _path in FILES:
    router.add_api_route(_path, page_file, include_in_schema=False, response_class=FileResponse)
