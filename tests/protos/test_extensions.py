"""How one package finds what another offers: installed, and in a checkout that is not."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

from outrider import extensions
from outrider.extensions import find_extension

ROOT = Path(__file__).parents[2]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
OFFERED = [(group, name) for group, offered in DECLARED.items() for name in offered]


@pytest.mark.parametrize(("group", "name"), OFFERED)
def test_what_a_checkout_offers_is_found_without_installing_it(
    group: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extensions, "entry_points", lambda **_: ())
    module, _, function = DECLARED[group][name].partition(":")
    assert find_extension(group, name) is getattr(importlib.import_module(module), function)


def test_what_nobody_offers_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_extension("outrider.draft_links", "carrier-pigeon") is None
    monkeypatch.setattr(extensions, "entry_points", lambda **_: ())
    monkeypatch.setattr(extensions, "_DECLARED", tmp_path / "pyproject.toml")
    assert find_extension("outrider.draft_links", "inprocess") is None
    # Another project's folder, which our packages were copied into.
    (tmp_path / "pyproject.toml").write_text("""
[project]
name = "other"
[project.entry-points."outrider.draft_links"]
inprocess = "nowhere:connect"
""")
    assert find_extension("outrider.draft_links", "inprocess") is None
