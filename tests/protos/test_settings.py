"""Settings: precedence, parsing, and nothing unknown let through."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from draft_service.config import DraftConfig
from outrider.settings import Settings, SettingsError, add_flags, load, setting
from target_service.config import TargetConfig


@dataclass(frozen=True)
class Example:
    name: str = setting("plain", "a name, 100 % of it")
    kind: str = setting("a", "a choice", choices=("a", "b"))
    count: int = setting(3, "how many")
    share: float = setting(0.5, "a share")
    enabled: bool = setting(True, "a switch")
    limit: int | None = setting(None, "a limit, if any")


@dataclass(frozen=True)
class Bounded(Settings):
    whole: int = setting(3, "from 1 to 8", ge=1, le=8)
    share: float = setting(0.5, "above 0", gt=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"whole": 0}, "whole: must be at least 1"),
        ({"whole": 9}, "whole: must be at most 8"),
        ({"share": 0.0}, "share: must be above 0"),
        ({"share": float("nan")}, "share: must be above 0"),
    ],
)
def test_a_number_out_of_bounds_is_named(values: dict[str, Any], message: str) -> None:
    assert Bounded(whole=8, share=0.1) == load(
        Bounded, "bounded", environment={"OUTRIDER_BOUNDED_WHOLE": "8", "OUTRIDER_BOUNDED_SHARE": "0.1"}
    )
    with pytest.raises(SettingsError, match=message):
        Bounded(**values)


def from_flags(*arguments: str, **sources: Any) -> Example:
    parser = argparse.ArgumentParser()
    add_flags(parser, Example)
    return load(Example, "example", parser.parse_args(arguments), **sources)


def test_defaults_hold_without_sources() -> None:
    assert load(Example, "example") == from_flags() == Example()


def test_flag_beats_environment_beats_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('[example]\nname = "file"\ncount = 1\nshare = 0.1\n[other]\nwhatever = 1\n')
    environment = {"OUTRIDER_EXAMPLE_COUNT": "2", "OUTRIDER_EXAMPLE_SHARE": "0.2", "OUTRIDER_OTHER_X": "1"}
    loaded = from_flags("--share", "0.3", environment=environment, path=path)
    assert (loaded.name, loaded.count, loaded.share) == ("file", 2, 0.3)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--no-enabled"], Example(enabled=False)),
        (["--limit", "7"], Example(limit=7)),
        (["--limit", "none"], Example(limit=None)),
        (["--kind", "b"], Example(kind="b")),
        (["--share", "1e-3"], Example(share=0.001)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_parse(arguments: list[str], expected: Example) -> None:
    assert from_flags(*arguments) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"OUTRIDER_EXAMPLE_COUNT": "many"}, "OUTRIDER_EXAMPLE_COUNT: 'many' is not a whole number"),
        ({"OUTRIDER_EXAMPLE_SHARE": ""}, "OUTRIDER_EXAMPLE_SHARE: '' is not a number"),
        ({"OUTRIDER_EXAMPLE_ENABLED": "maybe"}, "OUTRIDER_EXAMPLE_ENABLED: 'maybe' is not true or false"),
        ({"OUTRIDER_EXAMPLE_KIND": "c"}, "OUTRIDER_EXAMPLE_KIND: 'c' is not one of a, b"),
        ({"OUTRIDER_EXAMPLE_COLOUR": "red"}, "OUTRIDER_EXAMPLE_COLOUR: no such setting"),
    ],
    ids=["word for a number", "empty number", "neither true nor false", "not a choice", "unknown"],
)
def test_a_bad_variable_is_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(Example, "example", environment=environment)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[example]\ncolour = 1\n", r"\[example\] has no setting 'colour'"),
        ("[example]\ncount = true\n", "example.count: True is not a number"),
        ("[example]\nname = 1\n", "example.name: 1 is not text"),
        ("example = 1\n", r"\[example\] is not a table"),
        ("[example\n", "settings.toml"),
    ],
    ids=["unknown", "bool for a number", "number for text", "no table", "no TOML"],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        load(Example, "example", path=path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nowhere"):
        load(Example, "example", path=tmp_path / "nowhere.toml")


def test_help_shows_defaults_and_survives_percent_signs() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Example)
    text = parser.format_help()
    assert "100 % of it (default: plain)" in text and "a|b" in text and "--no-enabled" in text


@pytest.mark.parametrize(("config", "section"), [(TargetConfig, "target"), (DraftConfig, "draft")])
def test_the_services_take_every_setting_from_every_source(config: type, section: str, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, config)
    for field in dataclasses.fields(config):
        if field.type == "str" and not field.metadata["choices"]:
            flags = parser.parse_args([f"--{field.name.replace('_', '-')}", "x"])
            assert getattr(load(config, section, flags), field.name) == "x"
            environment = {f"OUTRIDER_{section.upper()}_{field.name.upper()}": "x"}
            assert getattr(load(config, section, environment=environment), field.name) == "x"
            path = tmp_path / "settings.toml"
            path.write_text(f'[{section}]\n{field.name} = "x"\n')
            assert getattr(load(config, section, path=path), field.name) == "x"


def test_the_services_agree_on_names_they_share() -> None:
    """An operator who knows one service's flags knows the other's."""
    target = {field.name: field.type for field in dataclasses.fields(TargetConfig)}
    shared = [field for field in dataclasses.fields(DraftConfig) if field.name in target]
    assert {field.name for field in shared} >= {"listen", "metrics_listen", "auth_tokens", "tls_key", "log_level"}
    assert all(field.type == target[field.name] for field in shared)
