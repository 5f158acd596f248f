"""The chat page at `/`: files of this folder, served as they stand, which call no other server."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent
_TYPES = {".html": "text/html", ".css": "text/css", ".svg": "image/svg+xml", ".js": "text/javascript"}
# By path in addresses. Scripts in vendor/ are of npm; see its README.md.
FILES = {
    "/" if file.name == "index.html" else f"/page/{file.relative_to(_FOLDER).as_posix()}": file
    for file in sorted(_FOLDER.rglob("*"))
    if file.suffix in _TYPES
}
HEADERS = {
    # Only the sanitiser may make elements of text.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_routes() -> list[Route]:
    """A route for every file of the page."""
    return [_route(path, file) for path, file in FILES.items()]


def _route(path: str, file: Path) -> Route:
    content, headers = file.read_bytes(), {**HEADERS, "content-type": f"{_TYPES[file.suffix]}; charset=utf-8"}

    async def serve(_request: Request) -> Response:
        return Response(content, headers=headers)

    return Route(path, serve)
