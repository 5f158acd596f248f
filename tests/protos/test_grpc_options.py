"""Channel options that gRPC does not know are ignored in silence: every one that is set has to be one of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from grpc._cython import cygrpc

ROOT = Path(__file__).parents[2]
PACKAGES = ("protos/outrider", "clients/outrider_client", "clients/outrider_gateway", "target_service", "draft_service")


def options_of(package: str) -> set[str]:
    found: set[str] = set()
    for path in (ROOT / package).rglob("*.py"):
        found |= set(re.findall(r'\("(grpc\.[a-z0-9_.]+)",', path.read_text()))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_every_option_is_known_to_grpc(package: str) -> None:
    library = Path(cygrpc.__file__).read_bytes()
    assert {name for name in options_of(package) if name.encode() not in library} == set()


def test_options_are_found() -> None:
    assert {"grpc.keepalive_time_ms", "grpc.http2.max_ping_strikes"} <= options_of("protos/outrider")
