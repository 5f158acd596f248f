"""The commands of the operator's pages: every flag that they name is one of its command's."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import tomllib
from contextlib import redirect_stdout
from dataclasses import fields
from functools import cache
from itertools import product
from pathlib import Path
from pkgutil import resolve_name

import pytest

from draft_service.config import DraftConfig
from draft_service.drafters.base import drafter_spec
from draft_service.neural.config import NeuralConfig
from draft_service.ngram.config import TrieConfig
from outrider.model_store import MODEL_STORE
from outrider.settings import HELP_ALL
from outrider_client.bench.table import figures_table
from outrider_client.cli.app import main
from outrider_client.cli.commands import COMMANDS
from target_service.config import MAX_SEQUENCES, TargetConfig
from target_service.core.events import EngineSnapshot
from target_service.speculation_state import speculation_state

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("operate.md", "troubleshooting.md", "protocol.md", "tuning.md")
OF_METRICS = ("operate.md", "troubleshooting.md", "tuning.md")
# Pages with commands to type, as seen from docs/.
SHOWING = (*sorted(path.name for path in DOCS.glob("*.md")), "../README.md", "../clients/README.md")
# Flags of other programs.
FOREIGN = {"--gpus", "--index-url", "--schema"}
# Pages whose links are followed.
LINKING = ("*.md", "docs/*.md", "clients/*.md", "clients/*/README.md", "kernels/*.md", "benchmarks/**/*.md")
# Commands that have commands of their own.
WITH_OWN = {"corpus", "head", "model", "weights"}


# What runs the commands that are modules of their own, with the words behind them.
MAINS = {
    "target_service": "target_service.__main__:main",
    "draft_service": "draft_service.service:run_service",
    "outrider_gateway": "outrider_gateway.__main__:main",
    "draft_service.training": "draft_service.training.__main__:main",
    MODEL_STORE: f"{MODEL_STORE}:main",
}


@cache
def help_of(*command: str) -> str:
    """In this process, which has imported most of it."""
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(shown), pytest.raises(SystemExit) as ended:
        patched.setattr(os, "execv", lambda _, words: resolve_name(MAINS[words[3]])(list(words[4:])))
        # The rare settings too, which only services have.
        main([*command, HELP_ALL if command[:1] in {("target",), ("draft",)} else "--help"])
    assert ended.value.code in (None, 0)
    return shown.getvalue()


def commands(page: str) -> list[list[str]]:
    """Every `outrider ..` of the page's examples, lines that go on joined and comments left out."""
    blocks = re.findall(r"```(?:sh)?\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("outrider ")]


def flags_of(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--") and " " not in word}


def named(command: str, *further: str) -> str:
    """The help of a command, or of one of its own, such as `weights update`."""
    if command == "draft":
        drafter = further[further.index("--drafter") + 1] if "--drafter" in further else "merged"
        return help_of("draft", "--drafter", drafter)
    own = further[:1] if command in WITH_OWN else ()
    return help_of(command, *own)


@pytest.mark.parametrize("command", [words for page in SHOWING for words in commands(page)], ids=" ".join)
def test_the_examples_flags_are_the_commands(command: list[str]) -> None:
    _, name, *words = command
    assert [flag for flag in sorted(flags_of(words)) if flag not in named(name, *words)] == []
    for flag, service in (("--target-flags", "target"), ("--draft-flags", "draft")):
        if flag in words:
            inner = flags_of(shlex.split(words[words.index(flag) + 1]))
            assert inner and all(one in named(service) for one in inner)


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_that_is_named_is_there(page: str) -> None:
    everywhere = "".join(map(named, ("target", "draft", "up", "gateway", "bench", "tune", "generate"))) + help_of()
    everywhere += named("weights", "update")
    found = set(re.findall(r"`(--[a-z-]+)", (DOCS / page).read_text())) - FOREIGN
    assert len(found) > 4
    assert [flag for flag in sorted(found) if flag not in everywhere] == []


@pytest.mark.parametrize("page", OF_METRICS)
def test_every_metric_that_is_named_is_there(page: str) -> None:
    known = (DOCS / "observability.md").read_text()
    found = set(re.findall(r"`(outrider_[a-z_]+)`", (DOCS / page).read_text()))
    assert found
    assert [metric for metric in sorted(found) if metric not in known] == []


TUNING = (DOCS / "tuning.md").read_text()


def defaults(setting: str) -> str:
    """What the page says of a setting's default."""
    (row,) = re.findall(rf"^\| `--{setting}`[^|]*\| ([^|]*) \|", TUNING, re.MULTILINE)
    return str(row)


def test_defaults_that_are_named_are_the_settings() -> None:
    target, trie, lookup = TargetConfig(), TrieConfig(), TargetConfig(device="cuda").lookup_rows
    assert defaults("lookup-tokens").startswith(f"{lookup} on a GPU")
    assert defaults("max-draft-nodes") == f"{target.max_draft_nodes}"
    assert defaults("speculative-disable-queue-size").startswith(f"{target.speculative_disable_queue_size}, as")
    assert target.speculative_disable_queue_size == MAX_SEQUENCES
    assert defaults("max-running") == f"{target.max_running}"
    assert defaults("max-step-rows").startswith(f"{target.step_rows}, and {TargetConfig(device='cuda').step_rows:,} on")
    assert defaults("capture-seconds") == f"{target.capture_seconds:g}"
    assert defaults("drafter") == f"`{DraftConfig().drafter}`"
    plain, captured = NeuralConfig().tree, NeuralConfig(cuda_graphs=True).tree
    assert defaults("num-steps").startswith(f"{plain.num_steps}, or {captured.num_steps} in captured graphs")
    sizes = f"{captured.topk}, {captured.frontier} and {captured.num_draft_tokens}"
    assert f"{plain.topk}, as many, {plain.num_draft_tokens}; captured {sizes}" in defaults("topk")
    assert defaults("min-score").startswith(f"{plain.min_score}, and {captured.min_score:.5f} in captured graphs")
    assert f"of a trie {trie.min_score:g}" in defaults("min-score")
    assert defaults("early-levels").startswith(f"{captured.early_levels} in")
    assert defaults("rows-per-level").startswith(f"{captured.rows_per_level} in")
    millions = [each // 1_000_000 for each in (trie.capacity, trie.tenant_capacity, trie.own_capacity)]
    assert defaults("capacity").startswith("{}, {} and {} million nodes".format(*millions))
    assert defaults("max-match") == f"{trie.max_match} tokens"


def test_the_file_of_settings_is_one() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", TUNING, re.DOTALL)
    tables = tomllib.loads(block)
    known = {"target": TargetConfig, "draft": DraftConfig}
    for name, table in tables.items():
        config = known.get(name) or drafter_spec(name).config
        assert table.keys() <= {field.name for field in fields(config)}


def test_what_info_says_is_what_the_page_says() -> None:
    """Each answer of the table is a part of one that a target gives."""
    said = set()
    flags = product((False, True), (False, True), (False, True))
    for draft, running, (connected, speculating, measuring) in product(("", "there:1"), (0, 2 * MAX_SEQUENCES), flags):
        snapshot = EngineSnapshot(
            running, 0, 0, 0, 0, speculating=speculating, draft_connected=connected, measuring=measuring
        )
        said.add(speculation_state(TargetConfig(draft=draft), snapshot, None, lookup=True).reason)
    rows = re.findall(r"^\| `([^`]+)` \| ", TUNING.partition("| it says |")[2].partition("Its line")[0], re.MULTILINE)
    assert len(rows) == 6
    for row in rows:
        parts = [part for part in row.split("..") if part.strip()]
        assert any(all(part in reason for part in parts) for reason in said), row


def test_columns_are_those_of_the_bench() -> None:
    table = figures_table({"target": {"model": "m", "dtype": "d"}, "prompts": 0, "results": []}, 200)
    columns = {str(column.header) for column in table.columns}
    named = re.findall(
        r"`([^`]+)`",
        "".join(
            re.findall(
                r"^\| (`[^|]+) \|", TUNING.partition("| column |")[2].partition("A trie learns")[0], re.MULTILINE
            )
        ),
    )
    assert len(named) == 7 and set(named) <= columns


def test_panels_are_those_of_the_dashboard() -> None:
    board = json.loads((DOCS.parent / "target_service/stack/grafana/dashboards/outrider.json").read_text())
    titles = {panel["title"] for panel in board["panels"]}
    rows = TUNING.partition("| panel |")[2].partition("On a CPU")[0]
    named = re.findall(r"^\| (\w[^|]+) \| `", rows, re.MULTILINE)
    assert len(named) == 5
    assert {*named, "Running ahead", "Steps without the draft they wanted", "Wait for the draft"} <= titles


def test_every_command_is_in_the_clients_table() -> None:
    table = (DOCS.parent / "clients/README.md").read_text().partition("## The `outrider` command")[2]
    named = {
        words.split()[0]
        for row in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
        for words in row.split("`")[1::2]
    }
    assert named == {command.name for command in COMMANDS}


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_every_page_is_linked_from_the_readme(page: str) -> None:
    assert f"(docs/{page})" in (DOCS.parent / "README.md").read_text()


@pytest.mark.parametrize(
    "page",
    sorted(str(path.relative_to(DOCS.parent)) for where in LINKING for path in DOCS.parent.glob(where)),
)
def test_every_link_leads_somewhere(page: str) -> None:
    """To a file that is there, and to a heading that it has."""
    source = DOCS.parent / page
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", source.read_text(), flags=re.DOTALL)):
        if "://" in link:
            continue
        name, _, heading = link.partition("#")
        target = (source.parent / name).resolve() if name else source
        assert target.exists(), link
        if heading and target.suffix == ".md":
            assert heading in anchors(target.read_text()), link


def anchors(text: str) -> set[str]:
    """Of every heading, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_two_screens() -> None:
    text = (DOCS.parent / "README.md").read_text()
    assert len(text.splitlines()) <= 62
    assert len(text.split()) <= 650
    # No paragraph of many numbers; tables are for those.
    for line in re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines():
        if not line.startswith("|"):
            assert len(line.split()) <= 60 and len(re.findall(r"\d[\d.,]*", line)) <= 10, line
