"""Drafters named as MODULE:CLASS: the one of docs/drafters.md, and what is refused."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from waits import HUNG_SECONDS

from draft_service.config import drafter_config
from draft_service.drafters.base import Drafter, DraftSequence, create, drafter_spec
from outrider.drafting.link import prepare_draft
from outrider.errors import NotSupported
from outrider.processes.python import module_command
from outrider.settings import SettingsError
from outrider.tree import TokenTree
from outrider.wire.frames import TreeLimits

_PAGE = (Path(__file__).parents[2] / "docs/drafters.md").read_text()
[EXAMPLE] = re.findall(r"^```python\n# bigram.py\n(.+?)^```$", _PAGE, re.M | re.S)
_NUMBERS = itertools.count()
_INHERITS = "from draft_service.drafters.base import Drafter\nfrom outrider.wire.frames import TreeLimits\n"
_ATTRIBUTES = "    name, limits, max_context, vocabulary_size = 'mine', TreeLimits(1, 1), 9, 0\n"
_PROPOSES = "    def propose(self, sequences): return []\n"
_WHOLE = f"{_INHERITS}class Mine(Drafter):\n{_ATTRIBUTES}{_PROPOSES}"

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Puts a module on the path; returns its name, which no other test uses."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def written(text: str) -> str:
        name = f"written_drafter_{next(_NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return written


def drafted(drafter: Drafter, tokens: list[int], limits: TreeLimits | None = None) -> TokenTree:
    sequence = DraftSequence(1, tokens, len(tokens), 300, limits=limits or TreeLimits())
    drafter.open(sequence)
    [tree] = drafter.propose([sequence])
    return tree


def test_the_pages_example_drafts(write: Write) -> None:
    name = f"{write(EXAMPLE)}:BigramDrafter"
    drafter = create(name, partial(drafter_config, environment={"OUTRIDER_DRAFTER_BIGRAM_TOKENS": "3"}))
    assert (drafter.name, drafter.limits) == ("bigram", TreeLimits(3, 3))
    assert drafted(drafter, [5, 6, 7, 8, 5]).token_ids == (5, 6, 7, 8)
    assert drafted(drafter, [5, 6, 7, 8, 5], TreeLimits(1, 9)).token_ids == (5, 6)
    assert drafted(drafter, [5, 6]).token_ids == (6,)


def test_the_pages_example_follows_a_sequence(write: Write) -> None:
    """What it knows after commits is what it would know of the whole text."""
    drafter = create(f"{write(EXAMPLE)}:BigramDrafter")
    coins = random.Random(3)
    sequence = DraftSequence(1, [1, 2], 2, 300)
    drafter.open(sequence)
    for _ in range(40):
        committed = coins.choices(range(6), k=coins.randint(1, 4))
        sequence.token_ids.extend(committed)
        drafter.advance(sequence, committed)
        [tree] = drafter.propose([sequence])
        TokenTree.checked(tree.token_ids, tree.parents, tree.scores, tree.distributions, vocabulary_size=300)
        assert tree == drafted(drafter, list(sequence.token_ids))


def test_its_settings_have_the_table_drafter(write: Write, tmp_path: Path) -> None:
    name = f"{write(EXAMPLE)}:BigramDrafter"
    path = tmp_path / "outrider.toml"
    path.write_text("[drafter]\nbigram_tokens = 7\n[draft]\nmax_sequences = 2\n")
    assert drafter_config(name, path=path).bigram_tokens == 7
    with pytest.raises(SettingsError, match="at most 64"):
        drafter_config(name, environment={"OUTRIDER_DRAFTER_BIGRAM_TOKENS": "65"})
    with pytest.raises(SettingsError, match="no such setting"):
        drafter_config(name, environment={"OUTRIDER_DRAFTER_OTHER": "1"})


def test_one_without_settings(write: Write) -> None:
    name = f"{write(_WHOLE)}:Mine"
    assert create(name, drafter_config).name == create(name).name == "mine"


def test_one_that_inherits_nothing(write: Write) -> None:
    methods = "".join(
        f"    def {name}(self, *_): pass\n" for name in ("start", "stop", "open", "advance", "close", "stats")
    )
    text = f"from outrider.wire.frames import TreeLimits\nclass Mine:\n{_ATTRIBUTES}{_PROPOSES}{methods}"
    assert create(f"{write(text)}:Mine").name == "mine"


def test_in_the_targets_process(write: Write) -> None:
    prepare_draft(f"inprocess:{write(EXAMPLE)}:BigramDrafter")
    with pytest.raises(SettingsError, match=r"inprocess:nowhere_to_be_found:Mine: .* no module nowhere_to_be_found"):
        prepare_draft("inprocess:nowhere_to_be_found:Mine")


def test_merged_with_another(write: Write) -> None:
    name = f"{write(EXAMPLE)}:BigramDrafter"
    environment = {"OUTRIDER_MERGED_MERGED_DRAFTERS": f"{name},prompt_lookup"}
    merged = create("merged", partial(drafter_config, environment=environment))
    assert drafted(merged, [5, 6, 7, 5, 6]).drafted


@pytest.mark.parametrize("name", ["a:", ":B", "a:B:C", "a b:C", "a/b.py:C", "inprocess:a:B", "a..b:C"])
def test_what_is_no_module_and_class_is_refused(name: str) -> None:
    with pytest.raises(NotSupported, match="MODULE:CLASS, such as"):
        drafter_spec(name)


@pytest.mark.parametrize("name", ["nowhere_to_be_found:Mine", "nowhere_to_be_found.drafting:Mine"])
def test_a_module_that_is_not_there(name: str) -> None:
    with pytest.raises(NotSupported, match=r"no module nowhere_to_be_found on Python's path: start this .* PYTHONPATH"):
        drafter_spec(name)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("import nowhere_to_be_found", "needs nowhere_to_be_found, which is not installed"),
        ("def f(:", "cannot be imported: SyntaxError"),
        ("1 / 0", r"cannot be imported: ZeroDivisionError: division by zero \(.*written_drafter_\d+\.py:1\)"),
        ("Other = 1", "has no Mine"),
        ("Mine = 1", "Mine is no class"),
        ("class Mine: pass", "it has no start, stop, .*, and does not inherit .*Drafter; docs/drafters.md"),
        (f"{_INHERITS}class Mine(Drafter):\n{_ATTRIBUTES}", "it has no propose; docs"),
        (f"{_INHERITS}class Mine(Drafter):\n{_PROPOSES}", "its name is no str; docs"),
        (_WHOLE.replace("TreeLimits(1, 1)", "4"), "its limits is no TreeLimits"),
        (_WHOLE.replace("'mine'", "''"), "its name is empty"),
        (_WHOLE + "    config = dict\n", "its config is no settings class"),
        (_WHOLE + "    def __init__(self, width): pass\n", "cannot be made: TypeError: .*'width'"),
        (_WHOLE + "    def __init__(self): open('/absent')\n", r"cannot be made: FileNotFoundError: .*py:\d+\)"),
    ],
)
def test_what_is_no_drafter_is_refused_in_a_line(write: Write, text: str, refusal: str) -> None:
    with pytest.raises(NotSupported, match=refusal) as raised:
        create(f"{write(text)}:Mine")
    assert "\n" not in raised.value.message


def test_the_service_takes_its_flags_and_refuses_in_a_line(write: Write, tmp_path: Path) -> None:
    name = f"{write(EXAMPLE)}:BigramDrafter"

    def said(*words: str) -> tuple[int, str]:
        command = module_command("draft_service", "--drafter", *words)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HUNG_SECONDS, check=False)
        return done.returncode, done.stdout + done.stderr

    status, help_text = said(name, "--help")
    assert status == 0 and "--bigram-tokens" in help_text and "tokens drafted, one after the other" in help_text
    for words in ((name, "--bigram-tokens", "0"), ("nowhere_to_be_found:Mine",)):
        status, refusal = said(*words)
        assert status == 2 and refusal.startswith("outrider draft: error: ") and refusal.count("\n") == 1
