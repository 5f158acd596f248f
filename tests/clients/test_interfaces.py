"""Every interface of clients/README.md: its example is there, short, and run by the test that the row names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "clients/README.md"
# Languages whose programs need a frame of packages, imports and error checks around what is said.
FRAMED = {"go": 30, "python of clients/README.md": 14}


def interfaces() -> list[tuple[str, str, str]]:
    """What one has, where its example is, and which test runs it."""
    section = PAGE.read_text().split("## Interfaces")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| .+? \| \[.+?\]\((.+?)\) \| `(.+?)` \|$", section, re.MULTILINE)
    assert len(rows) >= 12
    return [(have, where, test) for have, where, test in rows]


def section_of(where: str) -> tuple[Path, str]:
    """The file of a link, and the text under the heading that it names."""
    name, _, anchor = where.partition("#")
    path = (PAGE.parent / name).resolve() if name else PAGE
    parts = re.split(r"^#+ (.+)$", path.read_text(), flags=re.MULTILINE)
    sections = {
        re.sub(r"[^a-z0-9 -]", "", parts[i].lower()).replace(" ", "-"): parts[i + 1] for i in range(1, len(parts), 2)
    }
    return path, sections[anchor] if anchor else path.read_text()


@pytest.mark.parametrize(
    ("have", "where", "test"), interfaces(), ids=lambda value: value.split()[0] if " " in value else None
)
def test_an_interface_has_an_example_that_a_test_runs(have: str, where: str, test: str) -> None:
    path, section = section_of(where)
    source = (ROOT / test).read_text()
    # The test reads that page, or drives the page of the gateway or the command itself.
    named = {path.name, str(path.relative_to(ROOT)), path.stem}
    assert have in ("a browser", "a terminal") or any(name in source for name in named), test
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert blocks or have in ("a browser", "a terminal")
    if have == "any other language":
        # The whole page leads through it.
        return
    for language, block in blocks:
        limit = FRAMED.get(language, FRAMED.get(f"{language} of {path.relative_to(ROOT)}", 10))
        assert len([line for line in block.splitlines() if line.strip()]) <= limit, block


def test_every_door_is_in_the_picture() -> None:
    picture = re.search(r"```mermaid\n(.*?)```", (ROOT / "docs/architecture.md").read_text(), re.DOTALL)
    assert picture is not None
    for word in ("Python", "TypeScript", "Go", "npm", "curl", "browser", "other origins", "gateway", "vLLM"):
        assert word in picture[1], word
