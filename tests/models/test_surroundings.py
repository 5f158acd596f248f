"""What stands around a model's layers is compared with transformers' at load: masks, angles, embeddings and logits."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import TINY, TINY_OF
from models.test_families import PLAINLY, TINY_MODELS
from transformers import AutoConfig
from usual_models import USUAL, usual

from tree_models.families import describe
from tree_models.surroundings import surroundings_that_differ

# Keys that other families have, as configurations carry them on that were made from another model's.
_LEFTOVER = {"sliding_window": 16, "attn_logit_softcapping": 5.0, "embedding_multiplier": 3.0, "logit_scale": 0.5}
# Of these, keys that mean nothing to transformers' model and are refused or used here.
_OTHERWISE = {"minicpm3": "embedding_multiplier", "minimax": "sliding_window"}


def _config(model_type: str, settings: dict[str, Any]) -> Any:
    return AutoConfig.for_model(model_type, **(TINY | TINY_OF.get(model_type, {}) | settings))


@pytest.mark.parametrize("name", usual(TINY_MODELS, {*PLAINLY, *USUAL}))
def test_every_family_has_the_surroundings_of_transformers(name: str) -> None:
    model_type, settings = TINY_MODELS[name]
    assert surroundings_that_differ(_config(model_type, settings)) == []


@pytest.mark.parametrize("name", PLAINLY)
def test_leftover_keys_mean_what_they_mean_to_transformers(name: str) -> None:
    model_type, settings = TINY_MODELS[name]
    own = {key: value for key, value in _LEFTOVER.items() if key != _OTHERWISE.get(model_type)}
    assert surroundings_that_differ(_config(model_type, settings | own)) == []


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_tokens_that_see_later_ones_are_another_mask(name: str) -> None:
    model_type, settings = TINY_MODELS[name]
    config = _config(model_type, settings | {"is_causal": False})
    layers = range(config.num_hidden_layers)
    assert surroundings_that_differ(config) == [f"the mask of layer {index}" for index in layers]


@pytest.mark.parametrize(
    ("model_type", "settings", "what"),
    [
        # The families' default frequencies are of whole heads, whatever the configuration says.
        ("llama", {"partial_rotary_factor": 0.5}, "the angles of layer 0"),
        ("cohere", {"partial_rotary_factor": 0.3}, "the angles of layer 0"),
    ],
)
def test_other_angles_are_found(model_type: str, settings: dict[str, Any], what: str) -> None:
    assert what in surroundings_that_differ(_config(model_type, settings))


def test_a_scale_of_embeddings_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config("gemma", {})
    monkeypatch.setitem(describe.__globals__["FAMILIES"], "gemma", describe.__globals__["FAMILIES"]["llama"])
    assert "embeddings or logits" in surroundings_that_differ(config)


def test_an_original_context_beside_the_rotary_parameters_comes_first() -> None:
    factors = {"short_factor": [1.5] * 6, "long_factor": [2.0] * 6}
    settings = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **factors}}
    config = _config("llama", settings)
    config.original_max_position_embeddings = 128
    description = describe(config)
    assert description is not None and description.spec.max_positions == 128
    assert surroundings_that_differ(config) == []
