"""Which texts are addresses of services, and what is said about the others."""

from __future__ import annotations

import pytest

from outrider.addresses import address_problem, is_local, proxy_options
from outrider.healthcheck import main


@pytest.mark.parametrize(
    "address",
    [
        "localhost:50051",
        "127.0.0.1:1",
        "[::1]:50051",
        "example.com:65535",
        "unix:/run/outrider.sock",
        "unix:outrider.sock",
        "unix:///run/outrider.sock",
        "unix-abstract:outrider",
        "dns:///models:50051",
        "dns://1.1.1.1/models:50051",
        "ipv4:127.0.0.1:50051",
        "ipv6:[::1]:50051",
        "passthrough:///models:50051",
    ],
)
def test_addresses(address: str) -> None:
    assert address_problem(address) is None


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("", "it is empty"),
        ("localhost", "it has no port"),
        ("example.com", "it has no port"),
        ("[::1]", "it has no port"),
        (":50051", "it has no host"),
        ("localhost:", "'' is no port"),
        ("localhost:http", "'http' is no port"),
        ("localhost:٣", "'٣' is no port"),
        ("localhost:0", "ports are 1 to 65535"),
        ("localhost:65536", "ports are 1 to 65535"),
        ("::1:50051", "an IPv6 address stands in brackets"),
        ("two words:1", "'two words' is no host"),
        ("a:1,b:2", "'a:1,b' is no host"),
        ("host/path:1", "'host/path' is no host"),
        ("unix:", "nothing follows unix:"),
        ("dns:///", "nothing follows dns:"),
        ("http://localhost:50051/", "leave out http:// and write localhost:50051"),
        ("https://models:50051", "leave out https:// and write models:50051 with TLS"),
        ("grpc://models:50051", "leave out grpc:// and write models:50051"),
        ("http://models:50051/v1", "leave out http:// and write models:50051"),
        ("http://models", "leave out http:// and write models:PORT"),
        ("https://[::1]/", "leave out https:// and write [::1]:PORT with TLS"),
        ("http://", "leave out http:// and write HOST:PORT"),
        ("http://models:http", "leave out http:// and write HOST:PORT"),
        ("ftp://models:50051", "gRPC knows no ftp://"),
    ],
)
def test_what_is_none(address: str, reason: str) -> None:
    assert address_problem(address) == f"{address!r} is not HOST:PORT or unix:PATH: {reason}"


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:50051", True),
        ("localhost:50051", True),
        ("[::1]:50051", True),
        ("ipv4:127.0.0.2:50051", True),
        ("ipv6:[::1]:50051", True),
        ("dns:///localhost:50051", True),
        ("unix:/run/outrider.sock", True),
        ("unix-abstract:outrider", True),
        ("models:50051", False),
        ("unix-box:50051", False),
        ("10.0.0.1:50051", False),
        ("dns:///models:50051", False),
    ],
)
def test_no_proxy_is_asked_for_what_is_on_this_machine(address: str, local: bool) -> None:
    assert is_local(address) is local
    assert bool(proxy_options(address)) is local


def test_the_health_check_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["localhost"])
    assert ended.value.code == 2
    assert "'localhost' is not HOST:PORT or unix:PATH: it has no port" in capsys.readouterr().err
