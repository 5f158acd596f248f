"""Prompts made of texts: of every kind, no two alike, and the same for the same dice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.drafters.task_prompts import makers, prompts

PASSAGE = (
    "Every town along the river has a bridge, and the oldest of them was built by Martin Keller for the market. "
    "When the water rises in spring, the bridge is closed, and people take the ferry instead of the bridge. "
)
CODE = 'def double(number):\n    """Twice the number, as everybody knows.\n\n    >>> double(3)\n    6\n    """\n'


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Path, Path, Path]]:
    english, german, code = (tmp_path / name for name in ("english", "german", "code"))
    for folder in (english, german, code):
        folder.mkdir()
    (english / "a.html").write_text("".join(f"<p>{PASSAGE} Number {i} of the bridges.</p>" for i in range(80)))
    (german / "a.txt").write_text(
        "\n\n".join(f"Die Brücke Nummer {i} ist im Frühling leider gesperrt." for i in range(99))
    )
    (code / "a.py").write_text(
        "\n".join(CODE.replace("double", f"double_{i}") + "    return 2 * number\n" for i in range(9))
    )
    yield english, german, code


def test_every_kind_makes_prompts_of_the_texts(folders: tuple[Path, Path, Path]) -> None:
    made = {kind: make()[0] for kind, make in makers(*folders, random.Random(1)).items()}
    assert set(made) == {"chat", "qa", "math", "code", "translation", "summary", "rag"}
    assert "oldest of them" in made["summary"] and "<p>" not in made["summary"]
    assert "oldest of them" in made["rag"] and made["rag"].endswith("?")
    assert "Die Brücke Nummer" in made["translation"]
    # The docstring is given, and not what it asks for.
    assert ">>> double" in made["code"] and "return 2" not in made["code"]
    assert not any("{" in prompt for kind, prompt in made.items() if kind != "code")


def test_no_two_are_alike_and_dice_decide(folders: tuple[Path, Path, Path]) -> None:
    def drawn(seed: int) -> list[list[str]]:
        dice = random.Random(seed)
        return list(prompts(makers(*folders, dice), 150, dice))

    first = drawn(3)
    assert len({turns[0] for turns in first}) == len(first) == 150
    assert first == drawn(3) != drawn(4)
    assert any(len(turns) == 2 for turns in first)


def test_folders_without_text_are_named(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(SystemExit, match="no text"):
        makers(folders[0], empty, folders[2], random.Random(0))
