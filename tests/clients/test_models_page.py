"""docs/models.md: the families that it names are served, and what is refused it names in the words of the refusal."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from conftest import make_tiny
from transformers import LlamaConfig

from draft_service.drafters.base import DRAFTERS
from outrider.devices import check_device_name
from outrider.settings import SettingsError
from target_service.model import support
from target_service.model.loading import self_check
from target_service.model.loading.self_check import check_runner, own_logits
from target_service.model.runner import runner_for
from target_service.model.support import check_supported, kv_bytes

PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below this row of headings."""
    lines = PAGE.partition(heading)[2].splitlines()[2:]
    table = lines[: next(number for number, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


FAMILIES = [kind for row in rows("| families |") for kind in re.findall(r"`(\w+)`", row[1])]
REFUSALS = [said for row in rows("| it says |") for said in re.findall(r"`([^`]+)`", row[0])]
# Their tiny models have as many key heads as query heads, as all of the family have.
OLDER = {"gpt2", "gpt_neox", "opt", "persimmon", "deepseek_v3"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_is_named_is_served(family: str) -> None:
    model = make_tiny(family, **({"num_key_value_heads": 4} if family in OLDER else {}))
    check_supported(model.config, model)
    own = own_logits(model)
    check_runner(runner_for(model, None, num_pages=4, page_size=16), own)


def reasons(module: object) -> list[list[str]]:
    """Every reason for which the module refuses a model, as the pieces of text between what is filled in."""
    tree = ast.parse(Path(str(module.__file__)).read_text())
    found = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and getattr(node.exc.func, "id", "") == "ModelRefused"
        ):
            (said,) = node.exc.args
            parts = said.values if isinstance(said, ast.JoinedStr) else [said]
            texts = [str(part.value) for part in parts if isinstance(part, ast.Constant)]
            found.append([piece.strip(" :;()") for text in texts if (piece := text.partition("; ")[0]).strip(" :;()")])
    return found


def test_every_reason_is_on_the_page() -> None:
    known = [pieces for module in (support, self_check) for pieces in reasons(module) if pieces]
    assert len(known) >= 12
    everything = "\n".join(REFUSALS)
    foreign = [what for what in support._FOREIGN.values() if what not in everything]
    assert not foreign
    # What a configuration's own attribute is named for stands in `_FOREIGN`.
    known = [pieces for pieces in known if pieces != ["is not served"]]
    missing = [pieces for pieces in known if not any(all(piece in said for piece in pieces) for said in REFUSALS)]
    assert not missing


def test_every_word_of_the_page_is_a_reason() -> None:
    said = [pieces for module in (support, self_check) for pieces in reasons(module)]
    foreign = set(support._FOREIGN.values())
    for words in REFUSALS:
        assert words in foreign or any(pieces and all(piece in words for piece in pieces) for pieces in said), words


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
