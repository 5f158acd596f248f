"""The chat page at `/`: files of this folder, served as they stand, which call no other server."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_SCRIPTS = (
    *(
        "chat.js",
        "conversation.js",
        "elements.js",
        "figures.js",
        "markdown.js",
        "parts.js",
        "stream.js",
        "tree.js",
        "turns.js",
    ),
    # Of npm; see vendor/README.md.
    *("vendor/marked.js", "vendor/purify.js"),
)
# By path: the file, and its type.
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/chat.css": ("chat.css", "text/css; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    **{f"/page/{name}": (name, "text/javascript; charset=utf-8") for name in _SCRIPTS},
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
    return [_route(path, name, content_type) for path, (name, content_type) in FILES.items()]


def _route(path: str, name: str, content_type: str) -> Route:
    content = files(__package__).joinpath(*name.split("/")).read_bytes()

    async def serve(_request: Request) -> Response:
        return Response(content, headers={**HEADERS, "content-type": content_type})

    return Route(path, serve)
