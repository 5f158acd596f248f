"""The runner's logits equal transformers' own eager forward: in chunks, token by token, and over trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from conftest import make_tiny
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.shared.loaded_models import runner_for
from target_service.model.forward import ForwardInput
from target_service.model.runner import ModelRunner
from target_service.model.transformers_network import PackedLinear, pack_linears
from tree_kernels.attention import AttentionBatch
from tree_kernels.node_table import StepIntegers, shift_by_accepted
from tree_kernels.verification import RECORD
from tree_models.layers.linear import can_pack

pytestmark = pytest.mark.pairs

# Keys of 24, values of 12.
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_shared_experts": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-mha": {"num_key_value_heads": 4},
    "llama-wide-heads": {"head_dim": 20},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT | {"q_lora_rank": 24},
}
# Node 3 is a grandchild by way of 1; 2 and 5 are siblings of 1.
TREE = (0, 0, 0, 1, 3, 0, 2)


def family(name: str) -> PreTrainedModel:
    return make_tiny(name.split("-")[0], **FAMILIES[name])


def eager(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Logits [len(tokens), V] of one plain forward over all tokens."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    model.set_attn_implementation(before)
    return logits


class Driver:
    """Feeds one sequence to a runner and knows where its rows lie."""

    def __init__(self, runner: ModelRunner, tokens: int = 200) -> None:
        self.runner = runner
        # Not consecutive, as pages of a used cache are.
        pages = runner.cache.allocate(runner.cache.pages_for(tokens))
        self.pages, self.length = pages[::2] + pages[1::2], 0

    def step(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> ForwardInput:
        """Rows behind what is committed, and logits of all of them."""
        depths = list(range(len(token_ids)))
        if parents is not None:
            depths = [0]
            for parent in parents[1:]:
                depths.append(depths[parent] + 1)
        runner, start = self.runner, self.length
        return ForwardInput(
            token_ids=tuple(token_ids),
            positions=tuple(start + depth for depth in depths),
            slots=tuple(runner.cache.slots(self.pages, start, len(token_ids))),
            attention=AttentionBatch(
                query_starts=(0, len(token_ids)),
                prefix_lengths=(start,),
                pages=(tuple(self.pages),),
                page_size=runner.cache.page_size,
                parents=(None if parents is None else tuple(parents),),
            ),
            logit_rows=tuple(range(len(token_ids))),
        )

    def feed(self, token_ids: Sequence[int]) -> Tensor:
        logits = self.runner.forward(self.step(token_ids))
        self.length += len(token_ids)
        return logits


def assert_same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


def tokens_of(count: int, vocabulary: int = 211) -> list[int]:
    return [(7 * i * i + 3 * i + 11) % vocabulary for i in range(count)]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_then_tokens_then_a_tree_equal_the_eager_forward(name: str, page_size: int) -> None:
    model = family(name)
    text = tokens_of(75)
    expected = eager(model, text)
    runner = runner_for(model, None, num_pages=1024 // page_size, page_size=page_size)
    driver = Driver(runner)
    for start, end in ((0, 31), (31, 32), (32, 70), (70, 71), (71, 72)):
        assert_same(driver.feed(text[start:end]), expected[start:end])
    tree = tokens_of(len(TREE) + 20)[20:]
    logits = runner.forward(driver.step(tree, TREE))
    for row in range(len(TREE)):
        path, node = [tree[row]], row
        while node:
            node = TREE[node]
            path.append(tree[node])
        assert_same(logits[row : row + 1], eager(model, [*text[:72], *path[::-1]])[-1:])


def test_sequences_of_one_batch_do_not_see_each_other(tiny_model: PreTrainedModel) -> None:
    runner = runner_for(tiny_model, None, num_pages=64, page_size=16)
    texts = [tokens_of(40), tokens_of(23)[::-1], tokens_of(9)]
    drivers = [Driver(runner, 64) for _ in texts]
    for driver, text in zip(drivers[:2], texts[:2], strict=True):
        driver.feed(text[:-5])
    new = [texts[0][-5:], texts[1][-5:], texts[2]]
    steps = [driver.step(rows) for driver, rows in zip(drivers, new, strict=True)]
    starts = (0, 5, 10, 19)
    logits = runner.forward(
        ForwardInput(
            token_ids=sum((step.token_ids for step in steps), ()),
            positions=sum((step.positions for step in steps), ()),
            slots=sum((step.slots for step in steps), ()),
            attention=AttentionBatch(
                query_starts=starts,
                prefix_lengths=tuple(driver.length for driver in drivers),
                pages=tuple(tuple(driver.pages) for driver in drivers),
                page_size=16,
                parents=(None, None, None),
            ),
            logit_rows=(4, 9, 18),
        )
    )
    for row, text in enumerate(texts):
        assert_same(logits[row : row + 1], eager(tiny_model, text)[-1:])


def test_only_the_rows_asked_for_get_logits(tiny_model: PreTrainedModel) -> None:
    runner = runner_for(tiny_model, None, num_pages=16, page_size=16)
    step = Driver(runner, 32).step(tokens_of(9))
    everything = runner.forward(step)
    for rows in ((), (8,), (2, 5)):
        some = runner.forward(ForwardInput(step.token_ids, step.positions, step.slots, step.attention, logit_rows=rows))
        assert some.shape == (len(rows), 211)
        torch.testing.assert_close(some, everything[list(rows)])


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama", "phi3-longrope"])
def test_a_tree_that_reaches_past_the_context_changes_no_row_within(name: str) -> None:
    """Position tables end there, and longrope would turn every row's frequencies."""
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    settings: dict[str, Any] = {"max_position_embeddings": 64}
    if name == "phi3-longrope":
        lengths = {"original_max_position_embeddings": 64, "max_position_embeddings": 512}
        settings = {"rope_scaling": factors, "sliding_window": None} | lengths
    elif name != "llama":
        settings |= {"num_key_value_heads": 4, "word_embed_proj_dim": 48}
    model = make_tiny(name.split("-")[0], **settings)
    text = tokens_of(70)
    expected = eager(model, text[:64])
    runner = runner_for(model, None, num_pages=16, page_size=16)
    assert runner.max_context == 64
    driver = Driver(runner, 96)
    driver.feed(text[:60])
    tree = [*text[60:], 7]
    logits = runner.forward(driver.step(tree, [0, *range(len(text) - 61), 0]))
    assert_same(logits[:4], expected[60:])
    assert_same(logits[-1:], eager(model, [*text[:61], 7])[-1:])


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [(None, 2, (2,)), (5, 2, (5,)), ([5, 6], 2, (5, 6)), (None, [3, 4], (3, 4)), (None, None, ())],
    ids=["config's", "generation's first", "several", "several in config", "none"],
)
def test_end_tokens(generation: Any, config: Any, ends: tuple[int, ...]) -> None:
    model = make_tiny(eos_token_id=config)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = generation
    assert runner_for(model, None, num_pages=1, page_size=1).end_token_ids == ends


@pytest.mark.skipif(
    not can_pack(torch.bfloat16, torch.device("cpu")),
    reason="no bf16 matrix product to pack for here",
)
class TestPacking:
    @pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
    @pytest.mark.parametrize("rows", [0, 1, 5, 17, 64])
    def test_a_packed_layer_equals_the_plain_one(self, rows: int, bias: bool) -> None:
        torch.manual_seed(0)
        linear = torch.nn.Linear(48, 80, bias=bias, dtype=torch.bfloat16)
        inputs = torch.randn(1, rows, 48, dtype=torch.bfloat16)
        with torch.inference_mode():
            torch.testing.assert_close(PackedLinear(linear.weight, linear.bias)(inputs), linear(inputs))

    @pytest.mark.parametrize("model_type", ["llama", "qwen2", "phi3", "glm4", "bitnet"])
    def test_a_packed_model_says_the_same_step_after_step(self, model_type: str) -> None:
        plain, packed = (
            runner_for(make_tiny(model_type).to(torch.bfloat16), None, num_pages=16, page_size=16, packed=packed)
            for packed in (False, True)
        )
        drivers = [Driver(runner, 64) for runner in (plain, packed)]
        for rows in (tokens_of(20), tokens_of(1), tokens_of(6)[3:], tokens_of(1)):
            logits = [driver.feed(rows) for driver in drivers]
            torch.testing.assert_close(logits[0], logits[1], rtol=5e-2, atol=5e-2)

    def test_tied_embeddings_still_embed(self) -> None:
        logits = []
        for packed in (False, True):
            model = make_tiny(tie_word_embeddings=True).to(torch.bfloat16)
            runner = runner_for(model, None, num_pages=16, page_size=16, packed=packed)
            logits.append(Driver(runner, 32).feed(tokens_of(9)))
        torch.testing.assert_close(logits[0], logits[1], rtol=5e-2, atol=5e-2)

    def test_every_linear_layer_of_transformers_is_packed(self) -> None:
        model = make_tiny("bitnet").to(torch.bfloat16)
        pack_linears(model)
        assert not any(type(module) is torch.nn.Linear for module in model.modules())


def test_packing_is_for_bf16_on_a_cpu() -> None:
    assert not can_pack(torch.float32, torch.device("cpu"))
    assert not can_pack(torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize(
    ("chosen", "room", "laid_out", "expected"),
    [
        pytest.param((8,), 0, 0, (8,), id="the last row of a prompt"),
        pytest.param((), 0, 0, (), id="a piece of a prompt"),
        pytest.param((3, 4, 8), 0, 0, (3, 4, 8), id="some"),
        pytest.param(tuple(range(9)), 0, 0, tuple(range(9)), id="all"),
        # A prompt of 6 rows, and 3 of trees that the device may make larger.
        pytest.param((5, 6), 12, 1, (5, *range(6, 12)), id="rows of the device"),
    ],
)
def test_a_pass_computes_the_logits_that_are_read(
    chosen: tuple[int, ...], room: int, laid_out: int, expected: tuple[int, ...]
) -> None:
    model, computed = make_tiny(), list[int]()
    runner = runner_for(model, None, num_pages=8, page_size=4)
    driver = Driver(runner, 32)
    text = tokens_of(9)
    batch = driver.step(text)
    if room:
        starts = (0, 6, 9)
        pages = tuple(driver.pages[:4]), tuple(driver.pages[4:])
        slots = (*runner.cache.slots(pages[0], 0, 6), *runner.cache.slots(pages[1], 0, 3))
        attention = AttentionBatch(starts, (0, 0), pages, 4, (None, None))
        batch = replace(batch, positions=(*range(6), *range(3)), slots=slots, attention=attention)
    whole = runner.forward(replace(batch, logit_rows=tuple(range(9))))
    usual = runner.network.logits  # type: ignore[attr-defined]
    runner.network.logits = lambda rows: computed.append(len(rows)) or usual(rows)  # type: ignore[attr-defined]
    batch = replace(batch, logit_rows=chosen, room=room, laid_out=laid_out)
    assert batch.output_rows == expected
    done = runner.run_pass(batch, numpy.zeros(4, numpy.int32))
    there = [row for row in expected if row < 9]
    assert done.logits.shape == whole.shape and computed == [len(there)]
    torch.testing.assert_close(done.logits[there], whole[there])


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_pass_moves_on_on_the_host_as_it_does_on_the_device(page_size: int) -> None:
    """One sequence that awaits a token, one that knows it, one of several rows, and another that awaits one."""
    prefixes, counts = (5, 9, 3, 11), [0, 4, 2]
    pages, first = [], 0
    for prefix in prefixes:
        held = (prefix + 8) // page_size + 1
        pages.append(tuple(range(first, first + held)))
        first += held
    slots = [
        held[key // page_size] * page_size + key % page_size
        for held, keys in zip(pages, ((5,), (9,), (3, 4, 5), (11,)), strict=True)
        for key in keys
    ]
    attention = AttentionBatch((0, 1, 2, 5, 6), prefixes, tuple(pages), page_size, (None, None, (0, 0, 1), None))
    laid_out = ForwardInput((-3, 7, 1, 2, 3, -2), (5, 9, 3, 4, 5, 11), tuple(slots), attention, (0,))
    moved = laid_out.shifted_by_accepted(counts)
    flat = [page for held in pages for page in held]
    starts = [sum(map(len, pages[:b])) for b in range(len(pages))]
    records = [0] * (4 * RECORD)
    integers = (laid_out.token_ids, laid_out.positions, laid_out.slots, records, attention.query_starts, prefixes)
    step = StepIntegers(*(torch.tensor(values, dtype=torch.int32) for values in (*integers, starts, flat, (), (), ())))
    shift_by_accepted(step, torch.tensor(counts, dtype=torch.int32), page_size, last_position=100)
    assert moved.positions == tuple(step.positions.tolist()) == (7, 9, 3, 4, 5, 15)
    assert moved.slots == tuple(step.slots.tolist())
    assert moved.attention.prefix_lengths == tuple(step.prefix_lengths.tolist()) == (7, 9, 3, 15)
