"""Pages of other origins: which may call the API from a browser, and what they may read of its answers (CORS)."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from outrider_gateway.config import ANY_ORIGIN

# How long a browser may go by one answer to "may I?", in seconds: Chromium's own limit.
_REMEMBERED = 7200
# What a caller needs of an answer besides its body.
_READABLE = ("x-request-id", "retry-after")


def cross_origin(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """`app` for pages of these origins too: preflights are answered, and answers marked. `app` itself for none. No
    cookies: a caller is known by its bearer token alone, which a page has to have. Any header may be sent, since
    clients add their own (`x-stainless-*`), and none but those of `caller` are looked at."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=_READABLE,
        max_age=_REMEMBERED,
        # Chromium asks this for a gateway on the reader's own machine or network. Not for just any page.
        allow_private_network=ANY_ORIGIN not in origins,
    )
