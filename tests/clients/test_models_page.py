"""docs/models.md: the families that it names are served, and what is refused it names in the words of the refusal."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from classic_models import CLASSIC
from conftest import make_tiny
from latent_models import LONGCAT
from recurrent_models import RECURRENT
from text_parts import TEXT_PARTS
from transformers import LlamaConfig
from windowed_models import WINDOWED

from benchmarks.shared.loaded_models import runner_for
from draft_service.drafters.base import DRAFTERS
from outrider.checkpoints import causal_lm, config_sizes, folder, formats, plain_attention, tensors
from outrider.devices import check_device_name
from outrider.settings import SettingsError
from target_service.model import support
from target_service.model.loading import self_check
from target_service.model.loading.self_check import check_runner, own_logits
from target_service.model.support import check_supported, kv_bytes

CHECKPOINTS = (causal_lm, config_sizes, folder, formats, plain_attention, tensors)
PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below this row of headings."""
    lines = PAGE.partition(heading)[2].splitlines()[2:]
    table = lines[: next(number for number, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


FAMILIES = [kind for row in rows("| families |") for kind in re.findall(r"`([\w-]+)`", row[1])]
REFUSALS = [said for row in rows("| it says |") for said in re.findall(r"`([^`]+)`", row[0])]
# Their tiny models have as many key heads as query heads, as all of the family have.
OLDER = {"deepseek_v3", "axk1"}
_LONGCAT = "longcat_flash", LONGCAT


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_is_named_is_served(family: str) -> None:
    known = (*RECURRENT.values(), *WINDOWED.values(), *CLASSIC.values(), *TEXT_PARTS.values(), _LONGCAT)
    own_settings = next((settings for kind, settings in known if kind == family), {})
    model = make_tiny(family, **({"num_key_value_heads": 4} if family in OLDER else own_settings))
    check_supported(model.config, model)
    own = own_logits(model)
    check_runner(runner_for(model, None, num_pages=4, page_size=16), own)


def pieces_of(text: ast.AST) -> list[str]:
    """What a text says between what is filled in, as far as its first semicolon."""
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    said = [str(part.value) for part in parts if isinstance(part, ast.Constant)]
    return [piece for each in said if (piece := each.partition("; ")[0].strip(" :;()"))]


def tree_of(module: object) -> ast.Module:
    return ast.parse(Path(str(module.__file__)).read_text())  # type: ignore[attr-defined]


def reasons(module: object) -> list[list[str]]:
    """Every reason for which the module refuses a model."""
    return [
        pieces_of(node.exc.args[0])
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and getattr(node.exc.func, "id", "") == "ModelRefused"
    ]


def test_every_reason_is_on_the_page() -> None:
    known = [pieces for module in (support, self_check) for pieces in reasons(module) if pieces]
    assert len(known) >= 10
    known += [[what] for what in plain_attention._FOREIGN.values()]
    missing = [pieces for pieces in known if not any(all(piece in said for piece in pieces) for said in REFUSALS)]
    assert not missing


def test_every_word_of_the_page_is_a_reason() -> None:
    texts = [
        pieces_of(node)
        for module in (support, self_check, *CHECKPOINTS)
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    ]
    for words in REFUSALS:
        said = words.rstrip(" .")
        # A part of a text, or all of one, with what is filled in.
        assert any(
            any(said in piece for piece in pieces)
            or (all(piece in said for piece in pieces) and sum(map(len, pieces)) > len(said) / 2)
            for pieces in texts
        ), words


def test_every_drafter_is_on_the_page() -> None:
    named = {name for row in rows("| drafter |") for name in re.findall(r"`(\w+)`", row[0])}
    assert named == set(DRAFTERS)


def test_devices_and_memory_are_as_the_page_says() -> None:
    for device in ("cpu", "cuda", "cuda:1"):
        check_device_name(device)
    for device in ("mps", "xpu", "tpu"):
        with pytest.raises(SettingsError):
            check_device_name(device)
    # Llama 3.1 8B's shape: 32 layers, 8 key heads of 128, two bytes a number.
    shape = LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32)
    assert f"{kv_bytes(shape, 2, latent=False):,} bytes a token" in PAGE
