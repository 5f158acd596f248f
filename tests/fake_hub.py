"""A model hub on this machine: what `huggingface_hub` asks of one, over HTTP."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


class FakeHub(ThreadingHTTPServer):
    """Holds one model at one commit, which "main" and "v1" are names of. `fetched` counts how often each file was."""

    daemon_threads = True

    def __init__(self, name: str, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name = name
        self.files = files
        # Larger than they are, for those who look before they fetch.
        self.said_sizes: dict[str, int] = {}
        self.refused: set[str] = set()
        self.gated = False
        self.fetched: Counter[str] = Counter()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def listing(self, key: str) -> list[dict[str, Any]]:
        return [
            {
                key: name,
                "type": "file",
                "size": self.said_sizes.get(name, len(content)),
                "blobId": _etag(content),
                "oid": _etag(content),
            }
            for name, content in self.files.items()
        ]


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        api, files = f"/api/models/{hub.name}", f"/{hub.name}/resolve/"
        if path == "/":
            return self._send(b"a hub", body=body)
        if hub.gated and hub.name in path:
            return self._send(b"", HTTPStatus.FORBIDDEN, {"X-Error-Code": "GatedRepo"}, body=body)
        if path.startswith(f"{api}/tree/"):
            return self._send(json.dumps(hub.listing("path")).encode(), body=body)
        if path == api or path.startswith(f"{api}/revision/"):
            if path.rpartition("/revision/")[2] not in (api, "main", "v1", COMMIT):
                return self._send(b"", HTTPStatus.NOT_FOUND, {"X-Error-Code": "RevisionNotFound"}, body=body)
            said = {"id": hub.name, "sha": COMMIT, "siblings": hub.listing("rfilename")}
            return self._send(json.dumps(said).encode(), body=body)
        name = path.removeprefix(files).partition("/")[2]
        if not path.startswith(files) or name not in hub.files:
            return self._send(b"", HTTPStatus.NOT_FOUND, {"X-Error-Code": "RepoNotFound"}, body=body)
        if name in hub.refused:
            return self._send(b"", HTTPStatus.FORBIDDEN, {}, body=body)
        hub.fetched[name] += body
        content = hub.files[name]
        return self._send(content, HTTPStatus.OK, {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": COMMIT}, body=body)

    def _send(
        self,
        content: bytes,
        status: HTTPStatus = HTTPStatus.OK,
        headers: dict[str, str] | None = None,
        *,
        body: bool,
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


@contextmanager
def fake_hub(monkeypatch: Any, cache: Path, name: str, files: dict[str, bytes]) -> Iterator[FakeHub]:
    """A hub that `huggingface_hub` asks from now on, and an empty cache for what it gives."""
    from huggingface_hub import constants

    with FakeHub(name, files) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        # Made of the endpoint when it is imported.
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        thread = Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
