"""Settings: precedence, parsing, and nothing unknown let through."""

from __future__ import annotations

import argparse
import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from draft_service.config import DraftConfig
from draft_service.drafters.base import DRAFTERS, drafter_spec
from draft_service.training.config import TrainingConfig
from outrider import settings as outrider_settings
from outrider.settings import SECTIONS, CommandParser, Settings, SettingsError, add_flags, load, setting
from outrider.tree import MAX_ROWS
from outrider_gateway.config import GatewayConfig
from target_service.config import MOST_DRAFTED, MOST_LOOKED_UP, TargetConfig
from tree_kernels.node_table.layout import LOOKUP

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Example:
    name: str = setting("plain", "a name, 100 % of it")
    kind: str = setting("a", "a choice", choices=("a", "b"))
    count: int = setting(3, "how many")
    share: float = setting(0.5, "a share")
    enabled: bool = setting(True, "a switch")
    limit: int | None = setting(None, "a limit, if any")
    level: int = setting(2, "one of a few", choices=(1, 2))
    bounded: float = setting(0.5, "within bounds", gt=0, le=1)
    rows: int = setting(4, "no fewer than two", ge=2)
    old: int = setting(1, "no longer used", deprecated="found by itself")


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
    path.write_text('[example]\nname = "file"\ncount = 1\nshare = 0.1\n[target]\nwhatever = 1\n')
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
        ({"OUTRIDER_EXAMPLE_LEVEL": "3"}, "OUTRIDER_EXAMPLE_LEVEL: 3 is not one of 1, 2"),
        ({"OUTRIDER_EXAMPLE_ROWS": "1"}, "OUTRIDER_EXAMPLE_ROWS: must be at least 2"),
        ({"OUTRIDER_EXAMPLE_BOUNDED": "0"}, "OUTRIDER_EXAMPLE_BOUNDED: must be above 0"),
        ({"OUTRIDER_EXAMPLE_BOUNDED": "1.5"}, "OUTRIDER_EXAMPLE_BOUNDED: must be at most 1"),
        ({"OUTRIDER_EXAMPLE_BOUNDED": "nan"}, "OUTRIDER_EXAMPLE_BOUNDED: .nan. is not a number"),
    ],
    ids=[
        *("word for a number", "empty number", "neither true nor false", "not a choice", "unknown"),
        *("not a number of the choices", "too small", "not above", "too large", "NaN"),
    ],
)
def test_a_bad_variable_is_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(Example, "example", environment=environment)


def test_a_deprecated_setting_is_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert load(Example, "example").old == 1 and not caplog.records
    assert from_flags("--old", "7").old == 7
    assert "--old is deprecated: found by itself" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[example]\ncolour = 1\n", r"\[example\] has no setting 'colour'"),
        ("[example]\ncount = true\n", "example.count: True is not a number"),
        ("[example]\nname = 1\n", "example.name: 1 is not text"),
        ("example = 1\n", r"\[example\] is not a table"),
        ("[example\n", "settings.toml"),
        ("[exampel]\ncount = 1\n", r"there is no table \[exampel\]"),
        ("count = 1\n[example]\n", r"settings.toml: count stands outside of a table; it belongs below \[example\]"),
        (
            'model = "x"\n[example]\n',
            "settings.toml: model stands outside of a table; there are assistant, bench, client, .*target",
        ),
        ("[example]\ncount = 1e400\n", "example.count: inf is not a whole number"),
        ("[example]\nshare = 1e400\n", "example.share: inf is not a number"),
        ("[example]\nshare = nan\n", "example.share: nan is not a number"),
        ("[example]\ncount = 2.5\n", "example.count: 2.5 is not a whole number"),
    ],
    ids=[
        "unknown",
        "bool for a number",
        "number for text",
        "no table",
        "no TOML",
        "typo",
        "outside a table",
        "outside a table, named like one",
        "huge",
        "huge share",
        "nan",
        "half",
    ],
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


@dataclass(frozen=True)
class WithRare:
    common: int = setting(1, "for everybody")
    seldom: int = setting(2, "for few", rare=True)
    gone: int = setting(3, "for nobody", deprecated="it is found by itself")


@dataclass(frozen=True)
class MoreRare:
    later: int = setting(4, "for few of these", rare=True)


def test_rare_settings_are_listed_by_help_all_alone(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, WithRare)
    add_flags(parser, MoreRare)
    listed = parser.format_help()
    assert "--common" in listed and "show 3 more settings" in listed
    assert not any(flag in listed for flag in ("--seldom", "--gone", "--later"))
    assert vars(parser.parse_args(["--seldom", "5", "--later", "6"])) == {"seldom": "5", "later": "6"}
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--help-all"])
    whole = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(text in whole for text in ("for everybody", "for few (default: 2)", "for few of these", "deprecated"))


def test_the_help_of_a_target_fits_a_reader() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, TargetConfig)
    listed = [one for one in parser._actions if one.help is not argparse.SUPPRESS]
    assert len(listed) <= 45


def test_help_shows_bounds() -> None:
    parsers = argparse.ArgumentParser(), argparse.ArgumentParser()
    for parser, config in zip(parsers, (Example, Bounded), strict=True):
        add_flags(parser, config)
    text = " ".join("".join(parser.format_help() for parser in parsers).split())
    for said in (
        "how many (default: 3)",
        "no fewer than two (at least 2; default: 4)",
        "within bounds (above 0, at most 1; default: 0.5)",
        "from 1 to 8 (1 to 8; default: 3)",
        "above 0 (above 0; default: 0.5)",
    ):
        assert said in text


def test_drafters_are_those_of_the_draft_service() -> None:
    """Clients name them in their help, and may not import their list."""
    assert tuple(DRAFTERS) == outrider_settings.DRAFTERS


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


@pytest.mark.parametrize(("config", "section"), [(TargetConfig, "target"), (DraftConfig, "draft")])
def test_defaults_keep_their_own_bounds(config: type, section: str) -> None:
    for field in dataclasses.fields(config):
        environment = {f"OUTRIDER_{section.upper()}_{field.name.upper()}": str(field.default)}
        assert load(config, section, environment=environment) == config()


def test_bounds_that_are_known_elsewhere_too_are_the_same() -> None:
    """Settings are read before gRPC and torch are loaded, which the modules that know these bounds load."""
    assert MOST_DRAFTED == MAX_ROWS - 1
    assert MOST_LOOKED_UP == LOOKUP


def test_the_services_agree_on_names_they_share() -> None:
    """An operator who knows one service's flags knows the other's."""
    target = {field.name: field.type for field in dataclasses.fields(TargetConfig)}
    shared = [field for field in dataclasses.fields(DraftConfig) if field.name in target]
    assert {field.name for field in shared} >= {"listen", "metrics_listen", "auth_tokens", "tls_key", "log_level"}
    assert all(field.type == target[field.name] for field in shared)


def test_every_table_that_is_read_is_known() -> None:
    """A new section has to be added, or its table would be refused; and one that nobody reads would be taken."""
    read = set()
    for path in (*ROOT.glob("*_service/**/*.py"), *ROOT.glob("clients/*/**/*.py")):
        text = path.read_text()
        read |= set(re.findall(r'(?:load|options)\(\w+, "(\w+)", ', text))
        read |= set(re.findall(r'DrafterSpec\("(\w+)"', text))
    # vLLM gives its plugin settings, and no file has some.
    assert read - {"vllm"} == SECTIONS


@pytest.mark.parametrize("config", [TargetConfig, DraftConfig])
def test_services_check_bounds_where_a_program_makes_their_settings(config: type[Settings]) -> None:
    with pytest.raises(SettingsError, match="--max-message-bytes: must be at least 1024"):
        config(max_message_bytes=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("number", [2**63, 10**40])
def test_a_whole_number_has_64_bits(number: int) -> None:
    with pytest.raises(SettingsError, match="OUTRIDER_EXAMPLE_COUNT: must fit 64 bits with a sign"):
        load(Example, "example", environment={"OUTRIDER_EXAMPLE_COUNT": str(number)})
    with pytest.raises(SettingsError, match="--count: must fit 64 bits with a sign"):
        from_flags("--count", str(-number - 1))
    with pytest.raises(SettingsError, match="--kv-tokens: must fit 64 bits with a sign"):
        TargetConfig(kv_tokens=number)
    assert load(Example, "example", environment={"OUTRIDER_EXAMPLE_COUNT": str(2**63 - 1)}).count == 2**63 - 1


def test_numbers_have_a_least_value() -> None:
    """One that cannot be meant is refused where it is given, and not by what breaks of it later."""
    services = [
        TargetConfig,
        DraftConfig,
        TrainingConfig,
        GatewayConfig,
        *(drafter_spec(name).config for name in DRAFTERS),
    ]
    # Seeds may be any number.
    free = {
        f"{config.__name__}.{field.name}"
        for config in services
        for field in dataclasses.fields(config)
        if field.type in ("int", "float") and not field.name.endswith("seed") and not field.metadata["choices"]
        if field.metadata["bounds"]["ge"] is None and field.metadata["bounds"]["gt"] is None
    }
    assert not free


@pytest.mark.parametrize("value", ["--log-requests", "--mps --log-level debug", "", "-x", "plain"])
def test_flags_for_others_may_be_a_single_one(value: str) -> None:
    """A word that begins with a dash was taken for the command's own next flag, and its value for missing."""
    parser = CommandParser()
    parser.add_argument("--target-flags")
    parser.add_argument("--mps", action="store_true")
    given = parser.parse_args(["--target-flags", value, "--mps"])
    assert (given.target_flags, given.mps) == (value, True)
    assert parser.parse_args([f"--target-flags={value}"]).target_flags == value
