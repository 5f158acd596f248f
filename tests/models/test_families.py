"""Every family: a tiny random model of ours equals transformers' own. A newcomer adds a line to `TINY_MODELS`."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from classic_models import CLASSIC
from conftest import make_tiny
from latent_models import LONGCAT, V2, V3
from recurrent_models import RECURRENT
from text_parts import TEXT_PARTS
from thread_ranks import ThreadRank, on_ranks
from torch import Tensor
from transformers.models.falcon.modeling_falcon import build_alibi_tensor
from usual_models import USUAL, usual
from windowed_models import EXPERTS, PARTIAL, WINDOWED

from tree_kernels.attention import AttentionBatch, TreeAttention
from tree_kernels.latent_attention import LatentAttention
from tree_kernels.recurrence import RecurrentPass, RecurrentStates, TreeRecurrence
from tree_models.building import build
from tree_models.families import FAMILIES, describe
from tree_models.fused.forms import parts_of
from tree_models.layer_comparison import layers_that_differ
from tree_models.layers.decoder import Decoder
from tree_models.layers.paged import PagedPass
from tree_models.layers.placing import Placement
from tree_models.layers.rotary import RotaryEmbedding
from tree_models.ranks.decoder import build_rank
from tree_models.ranks.share import share_of
from tree_models.reference import published_tensors
from tree_models.spec import FamilyRefused, LatentSpec

SIGMOID: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "moe_intermediate_size": 16, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
    "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256,
    "short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [2.0] * 6,
}  # fmt: skip

# By a name for the test: `model_type`, and settings beside the usual ones of `conftest.TINY`.
TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases, llama3": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "llama, tied, linear": (
        "llama",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "ministral": ("ministral", {"sliding_window": 512, "head_dim": 12}),
    "ministral3": (
        "ministral3",
        {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "phi3": ("phi3", {"rope_parameters": PARTIAL}),
    "phi3, longrope": ("phi3", {"rope_parameters": LONGROPE}),
    "gemma": ("gemma", {"head_dim": 16}),
    "glm": ("glm", {"head_dim": 16, "attention_bias": True}),
    "glm4": ("glm4", {"head_dim": 16}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            "layer_types": ["attention"] * 2, "num_local_experts": 0, "position_embedding_type": None,
            "shared_intermediate_size": 64, "mamba_n_heads": 4, "residual_multiplier": 0.5,
        },
    ),
    "olmo": ("olmo", {"clip_qkv": 0.4}),
    "olmo2": ("olmo2", {}),
    "cohere": ("cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere, tied": ("cohere", {"tie_word_embeddings": True}),
    "seed_oss": ("seed_oss", {"head_dim": 12, "attention_out_bias": True}),
    "ernie4_5": ("ernie4_5", {"use_bias": True, "head_dim": 12}),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "nemotron": ("nemotron", {"head_dim": 12}),
    "qwen2_moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 24, "mlp_only_layers": [0]}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True, "head_dim": 16}),
    "mixtral": ("mixtral", EXPERTS),
    "glm4_moe": ("glm4_moe", SIGMOID | {"use_qk_norm": True, "head_dim": 16}),
    "olmoe": ("olmoe", EXPERTS | {"clip_qkv": 0.4}),
    "granitemoe": ("granitemoe", EXPERTS | {"attention_multiplier": 0.3}),
    "granitemoeshared": ("granitemoeshared", EXPERTS | {"shared_intermediate_size": 24}),
    "granitemoehybrid, experts": (
        "granitemoehybrid",
        EXPERTS
        | {
            "layer_types": ["attention"] * 2, "position_embedding_type": "rope", "shared_intermediate_size": 64,
            "mamba_n_heads": 4,
        },
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1, "moe_layer_interval": 1, "moe_layer_end_index": 1, "head_dim": 12,
        },
    ),
    "phimoe": ("phimoe", EXPERTS | {"attention_bias": True, "lm_head_bias": True}),
    "minimax_m2": ("minimax_m2", EXPERTS | {"head_dim": 16, "rope_parameters": PARTIAL}),
    "deepseek_v2": ("deepseek_v2", V2 | {"rope_parameters": YARN}),
    "deepseek_v2, groups": (
        "deepseek_v2",
        V2
        | {
            "q_lora_rank": 24, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
            "topk_method": "group_limited_greedy", "num_experts_per_tok": 3,
        },
    ),
    "deepseek_v3": ("deepseek_v3", V3 | SIGMOID),
    "axk1": ("axk1", V3 | SIGMOID),
    "longcat_flash": ("longcat_flash", LONGCAT),
    "deepseek_v3, halves": ("deepseek_v3", V3 | {"q_lora_rank": None, "rope_interleave": False}),
    "glm4_moe_lite": ("glm4_moe_lite", V3 | SIGMOID),
    "glm4_moe_lite, listed": (
        "glm4_moe_lite",
        {name: value for name, value in (V3 | SIGMOID).items() if name != "first_k_dense_replace"}
        | {"mlp_layer_types": ["sparse", "dense"]},
    ),
    "dots1": ("dots1", SIGMOID | {"head_dim": 16, "sliding_window": 5, "max_window_layers": 1}),
    "solar_open": ("solar_open", {k: v for k, v in SIGMOID.items() if k != "first_k_dense_replace"} | {"head_dim": 16}),
    "diffllama": ("diffllama", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6}),
    "flex_olmo": ("flex_olmo", EXPERTS),
    "helium": ("helium", {}),
    "jais2": ("jais2", {"head_dim": 16}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 16}),
    "hunyuan_v1_dense, alpha": (
        "hunyuan_v1_dense",
        {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}},
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"head_dim": 16, "num_experts": 4, "moe_topk": [1, 2]}),
    "hy_v3": (
        "hy_v3", EXPERTS | {"head_dim": 16, "num_shared_experts": 1, "router_scaling_factor": 2.5},
    ),
    "hyperclovax": (
        "hyperclovax", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 0.5, "head_dim": 12},
    ),
    "hyperclovax, norms before alone": ("hyperclovax", {"use_post_norm": False, "attention_multiplier": 0.3}),
    "phi": ("phi", {"tie_word_embeddings": False}),
    "phi, normed": ("phi", {"qk_layernorm": True, "rope_parameters": PARTIAL}),
    "nanochat": ("nanochat", {}),
    "nanochat, uncapped": ("nanochat", {"head_dim": 16, "attention_bias": True, "final_logit_softcapping": None}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True}),
    "youtu": ("youtu", V3),
    "minicpm3": ("minicpm3", V3 | {"scale_emb": 3.0, "scale_depth": 1.4}),
} | WINDOWED | RECURRENT | CLASSIC | TEXT_PARTS  # fmt: skip
PROMPT, NEW_TOKENS = 9, 6
# What rounding in fp32 makes of logits of about 10.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}


@dataclass
class Cache:
    keys: list[Tensor]
    values: list[Tensor]


@dataclass
class Served:
    """A decoder with pages of its own, in a random order."""

    decoder: Decoder
    page_size: int
    latent: bool

    def __post_init__(self) -> None:
        self.pages = tuple(random.Random(0).sample(range(64), 64))
        shapes = self.decoder.cache_shapes if self.latent else self.decoder.expanded_shapes
        self.cache = Cache(
            [torch.zeros(64, self.page_size, heads, width) for heads, width, _ in shapes],
            [torch.zeros(64, self.page_size, heads, width) for heads, _, width in shapes],
        )
        self.attention: Any = LatentAttention() if self.latent else TreeAttention()
        self.recurrence, self.states = TreeRecurrence(), None
        if self.decoder.recurrent_layers is not None:
            count, shape = self.decoder.recurrent_layers
            self.states = RecurrentStates(count, 1, 6, shape, torch.float32, torch.device("cpu"))

    def run(self, tokens: list[int], start: int, parents: tuple[int, ...] | None = None) -> Tensor:
        """Logits of a chain or a tree of tokens behind `start` keys."""
        rows = len(tokens)
        depths = list(range(rows))
        if parents is not None:
            for row in range(1, rows):
                depths[row] = depths[parents[row]] + 1
        held = self.pages[: -(-(start + rows) // self.page_size)]
        slots = [held[t // self.page_size] * self.page_size + t % self.page_size for t in range(start, start + rows)]
        batch = AttentionBatch((0, rows), (start,), (held,), self.page_size, (parents,))
        recurrent = None
        if self.states is not None:
            recurrent = RecurrentPass(self.recurrence, self.recurrence.plan(batch, (1,), self.states), self.states)
        step = PagedPass(self.attention, self.attention.plan(batch), torch.tensor(slots), self.cache, recurrent)
        with torch.inference_mode():
            logits: Tensor = self.decoder(torch.tensor(tokens), start + torch.tensor(depths), step)
        return logits


# One of every family.
PLAINLY = [name for name in TINY_MODELS if "," not in name]


@pytest.fixture(scope="module", params=TINY_MODELS, ids=str)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Decoder]:
    """transformers' model and ours, of the same weights."""
    model_type, settings = TINY_MODELS[request.param]
    model = make_tiny(model_type, **settings)
    with torch.no_grad():
        # Weights that are initialised to ones or zeros would hide where they go.
        for index, (name, tensor) in enumerate(itertools.chain(model.named_parameters(), model.named_buffers())):
            if not tensor.is_floating_point():
                continue
            if (tensor.ndim == 1 or not tensor.any()) and "inv_freq" not in name and "act_fn" not in name:
                tensor.add_(0.2 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(index)))
    model.set_attn_implementation("eager")
    description = describe(model.config)
    assert description is not None
    latent = isinstance(description.spec.layers[0].attention, LatentSpec)
    place = Placement(torch.device("cpu"), torch.float32, latent=latent)
    return model, build(description, published_tensors(model), place)


def own_logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def is_latent(decoder: Decoder) -> bool:
    return isinstance(decoder.spec.layers[0].attention, LatentSpec)


@pytest.mark.values
@pytest.mark.parametrize("page_size", [1, 16])
def test_logits_are_those_of_transformers(pair: tuple[Any, Decoder], page_size: int) -> None:
    """Of a prompt in two chunks, then of a tree behind it, path by path."""
    model, decoder = pair
    rng = random.Random(1)
    prompt = [rng.randrange(211) for _ in range(PROMPT)]
    tree, parents = [rng.randrange(211) for _ in range(6)], (0, 0, 0, 1, 1, 2)
    paths = [[0, 1, 3], [0, 1, 4], [0, 2, 5]]
    forms = (False, True) if is_latent(decoder) else (False,)
    for latent in forms:
        served = Served(decoder, page_size, latent)
        got = torch.cat([served.run(prompt[:5], 0), served.run(prompt[5:], 5)])
        torch.testing.assert_close(got, own_logits(model, prompt), **TOLERANCE)
        rows = served.run(tree, PROMPT, parents)
        for path in paths:
            expected = own_logits(model, prompt + [tree[node] for node in path])[-len(path) :]
            torch.testing.assert_close(rows[path], expected, **TOLERANCE)


# Of every family, and of settings of one that make a description of its own: by transformers' layers, those of a
# family are the same.
@pytest.mark.parametrize("pair", usual(TINY_MODELS, {*PLAINLY, *USUAL}), indirect=True)
def test_the_check_at_load_finds_no_layer_that_differs(pair: tuple[Any, Decoder]) -> None:
    """Or a model of the family would be computed by transformers' layers, or be refused."""
    model, decoder = pair
    assert layers_that_differ(decoder, model.config, published_tensors(model)) == []


def test_the_page_says_which_layers_are_fused(pair: tuple[Any, Decoder], request: pytest.FixtureRequest) -> None:
    """Where some layers have it, it depends on a checkpoint's settings."""
    _, decoder = pair
    model_type = TINY_MODELS[request.node.callspec.params["pair"]][0]
    said = (Path(__file__).parents[2] / "docs" / "models.md").read_text().partition("Some layers have it of ")[2]
    parts = said.partition("\n")[0].partition("None has it of ")[::2]
    some, none = (re.findall(r"`([a-z0-9_-]+)`", part) for part in parts)
    fused = [parts_of(layer) is not None for layer in decoder.layers]
    if model_type in none:
        assert not any(fused)
    elif model_type not in some:
        assert all(fused)


# Where logits are equal, so are they.
@pytest.mark.full
def test_greedy_tokens_are_those_of_generate(pair: tuple[Any, Decoder]) -> None:
    model, decoder = pair
    prompt = [(17 + 7919 * i) % 211 for i in range(PROMPT)]
    model.generation_config.eos_token_id = None
    limits = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = model.generate(torch.tensor([prompt]), **limits)[0, PROMPT:].tolist()
    served, tokens = Served(decoder, 16, is_latent(decoder)), list(prompt)
    logits = served.run(prompt, 0)
    for _ in range(NEW_TOKENS):
        tokens.append(int(logits[-1].argmax()))
        logits = served.run(tokens[-1:], len(tokens) - 1)
    assert tokens[PROMPT:] == expected


def size_of(decoder: Decoder) -> int:
    return sum(weight.numel() for weight in decoder.parameters())


# Shares are made of a description alone.
@pytest.mark.parametrize("pair", usual(TINY_MODELS, USUAL), indirect=True)
def test_ranks_compute_the_same_logits(pair: tuple[Any, Decoder], request: pytest.FixtureRequest) -> None:
    """A prompt, and a tree behind it, on every rank. Every second family has four ranks, more than there are key
    heads."""
    model, decoder = pair
    name = request.node.callspec.params["pair"]
    # Delta nets here have two key heads, which are not repeated; Mamba2's groups are.
    many = list(TINY_MODELS).index(name) % 2 and name not in RECURRENT
    ranks = 4 if many or name.startswith("nemotron_h") else 2
    description = describe(model.config)
    assert description is not None
    tensors, latent = published_tensors(model), is_latent(decoder)
    prompt, tree, parents = list(range(3, 3 + PROMPT)), [5, 9, 5, 17, 40, 2], (0, 0, 0, 1, 1, 2)

    def logits(group: ThreadRank) -> Tensor:
        place = Placement(torch.device("cpu"), torch.float32, latent=latent, ranks=group)
        own = build_rank(description, tensors, place)
        assert size_of(own) < 0.8 * size_of(decoder)
        served = Served(own, 4, latent)
        return torch.cat([served.run(prompt, 0), served.run(tree, PROMPT, parents)])

    whole = Served(decoder, 16, latent)
    expected = torch.cat([whole.run(prompt, 0), whole.run(tree, PROMPT, parents)])
    for got in on_ranks(ranks, logits):
        torch.testing.assert_close(got, expected, **TOLERANCE)


def test_what_ranks_cannot_share_is_refused() -> None:
    found = describe(make_tiny("llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=48).config)
    assert found is not None
    with pytest.raises(FamilyRefused, match="4 ranks: 6 attention heads cannot be divided by them"):
        share_of(found.spec, found.names, 0, 4)
    with pytest.raises(FamilyRefused, match="2 ranks: 3 key heads can neither be divided nor repeated"):
        share_of(found.spec, found.names, 0, 2)
    model_type, settings = RECURRENT["zaya"]
    wider = {"num_attention_heads": 6, "num_key_value_heads": 6, "moe_intermediate_size": 24}
    found = describe(make_tiny(model_type, **settings | wider).config)
    assert found is not None
    with pytest.raises(FamilyRefused, match="3 ranks: values of two tokens are not divided by an odd number"):
        share_of(found.spec, found.names, 0, 3)


def test_tokens_without_a_vector_of_their_own_read_the_first_ones() -> None:
    """Of images and sounds, in Gemma 3n; a draft may have any."""
    model_type, settings = WINDOWED["gemma3n"]
    model = make_tiny(model_type, **settings | {"vocab_size_per_layer_input": 200})
    description = describe(model.config)
    assert description is not None
    decoder = build(description, published_tensors(model), Placement(torch.device("cpu"), torch.float32))
    assert decoder.layer_inputs is not None
    with torch.inference_mode():
        first, last, *beyond = decoder.layer_inputs(torch.tensor([0, 199, 200, 210]), torch.zeros(4, 48))
    assert not torch.equal(last, first) and all(torch.equal(one, first) for one in beyond)


@pytest.mark.parametrize("bias", [-1.0, 3.0, 9.0])
def test_matrix_memories_are_divided_by_what_their_keys_make(bias: float) -> None:
    """Gates begin so small in xLSTM that one is what is divided by."""
    model_type, settings = RECURRENT["xlstm"]
    model = make_tiny(model_type, **settings)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("igate_preact.bias"):
                tensor.fill_(bias)
    description = describe(model.config)
    assert description is not None
    served = Served(
        build(description, published_tensors(model), Placement(torch.device("cpu"), torch.float32)), 16, False
    )
    tokens = [(17 + 7919 * i) % 211 for i in range(60)]
    got = torch.cat([served.run(tokens[:40], 0), served.run(tokens[40:], 40)])
    torch.testing.assert_close(got, own_logits(model, tokens), **TOLERANCE)


def test_falcon_falls_as_transformers_rounds_it() -> None:
    """Also where a position is no number of bfloat16."""
    model_type, settings = CLASSIC["falcon, falling, twelve heads"]
    description = describe(make_tiny(model_type, **settings).config)
    assert description is not None
    turning = description.spec.layers[0].rotary
    assert turning is not None
    expected = build_alibi_tensor(torch.ones(1, 2000, dtype=torch.int64), 12, torch.bfloat16)
    found = RotaryEmbedding(turning, torch.device("cpu"))(torch.arange(2000)).place_keys
    assert found is not None and torch.equal(found.T[:, None], expected)


def test_every_family_is_tried() -> None:
    assert set(FAMILIES) == {model_type for model_type, _ in TINY_MODELS.values()}
