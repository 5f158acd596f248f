"""The engine over captured steps that the device verifies, against eager steps that the host verifies, on one GPU."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_tiny
from engine_harness import Outcome, Propose, engine_config, knowing_tree, make_runner, random_tree, request, run
from in_pass_heads import KINDS, drafting_runner, heads_of
from latent_models import make_latent
from other_weights import other_weights
from structured_forms import SCHEMAS, trained_tokenizer
from structured_forms import VOCABULARY as FORM_VOCABULARY
from waits import HUNG_SECONDS
from windowed_models import windowed_model

from benchmarks.shared.loaded_models import runner_for
from outrider.sampling import SamplingParams, VerificationMode
from outrider.structured_output import StructuredOutput
from target_service.core.sequence import SequenceRequest
from target_service.engine import common_pages
from target_service.execution import device_executor
from target_service.execution.device_executor import DeviceSteps
from target_service.execution.host_executor import HostSteps
from target_service.model.loading.self_check import check_runner, own_logits
from target_service.model.runner import ModelRunner
from target_service.model.weights.files import read_weights
from target_service.model.weights.host_memory import HostMemory
from target_service.model.weights.slots import weight_slots, write_weights
from tree_models.slots import specs_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
VOCABULARY = 211
ROWS, SEQUENCES = 256, 16
SAMPLINGS = {
    "greedy": SamplingParams(ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, seed=99, ignore_eos=True),
    "filtered": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=7, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.3, seed=5, ignore_eos=True
    ),
}


def requests(sampling: SamplingParams, mode: VerificationMode | None = None) -> list[SequenceRequest]:
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (1, 5, 17, 40, 90)]
    return [request(prompt, 24, sampling=sampling, mode=mode) for prompt in prompts]


def captured(
    runner: ModelRunner,
    *,
    invariant: bool = False,
    enable_device_row_selection: bool = False,
    hooked: tuple[int, ...] = (),
    common: bool = False,
) -> tuple[ModelRunner, DeviceSteps]:
    # Only on a machine that runs these tests: Triton may be absent elsewhere.
    from target_service.model.cuda_graphs.runner import CapturedRunner, CaptureOptions
    from tree_models.fused.preparing import LayerOptions

    if enable_device_row_selection:
        runner.enable_device_row_selection(SEQUENCES)
    layers = LayerOptions(compiled=not invariant, invariant=invariant)
    options = CaptureOptions(ROWS, SEQUENCES, layers, hooked, common_pages=common)
    taken = CapturedRunner(runner, options)
    # As at a start whose time was over before the largest sizes were captured.
    taken.capture(taken.buckets[: len(taken.buckets) // 2])
    assert taken.captured_steps == (len(taken.buckets) // 2, len(taken.buckets))
    steps = DeviceSteps(taken, max_sequences=SEQUENCES, max_rows=ROWS)
    steps.warm_up()
    return taken, steps


@pytest.fixture(scope="module")
def exact() -> Iterator[tuple[ModelRunner, ModelRunner, DeviceSteps]]:
    """In fp32: an eager runner, and a captured one with its steps."""
    eager = make_runner(make_tiny().cuda(), attention="triton")
    taken, steps = captured(make_runner(make_tiny().cuda(), attention="triton"))
    yield eager, taken, steps
    torch.cuda.empty_cache()


def drafter(name: str, wanted: Sequence[SequenceRequest], said: Sequence[Outcome]) -> Propose | None:
    if name == "none":
        return None
    if name == "random":
        return random_tree(VOCABULARY, 24)
    whole = [(*one.token_ids, *outcome.token_ids) for one, outcome in zip(wanted, said, strict=True)]
    return knowing_tree(whole, VOCABULARY, 40, right=0.8)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("draft", ["none", "random", "knowing"])
@pytest.mark.parametrize("stagger", [0, 3], ids=["together", "staggered"])
def test_captured_steps_say_what_eager_ones_say(
    exact: tuple[ModelRunner, ModelRunner, DeviceSteps], sampling: SamplingParams, draft: str, stagger: int
) -> None:
    eager, taken, steps = exact
    wanted = requests(sampling)
    said = run(eager, wanted)
    propose = drafter(draft, wanted, said)
    outcomes = run(taken, wanted, propose=propose, stagger=stagger, launch=steps)
    assert [one.token_ids for one in outcomes] == [one.token_ids for one in said]
    if draft == "knowing":
        assert sum(one.finished.totals.accepted_tokens for one in outcomes) > 20


@pytest.mark.parametrize("draft", ["none", "knowing"])
@pytest.mark.parametrize("selects", [False, True], ids=["host rows", "device rows"])
def test_pages_in_common_are_read_once(monkeypatch: pytest.MonkeyPatch, draft: str, selects: bool) -> None:
    from target_service.model.cuda_graphs.runner import CapturedRunner

    monkeypatch.setattr(common_pages, "_WORTH_KEYS", 8 * 128)
    rng = random.Random(4)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(300)]
    sampling = SAMPLINGS["seeded"]
    wanted = [request([*shared, 5 + i, *range(3, 3 + 7 * i)], 40, sampling=sampling) for i in range(12)]
    said = run(make_runner(make_tiny().cuda(), kv_tokens=16_384, attention="torch"), wanted)
    eager = make_runner(make_tiny().cuda(), kv_tokens=16_384, attention="triton")
    assert [one.token_ids for one in run(eager, wanted)] == [one.token_ids for one in said]
    runner = make_runner(make_tiny().cuda(), kv_tokens=16_384, attention="triton")
    taken, steps = captured(runner, enable_device_row_selection=selects, common=True)
    outcomes = run(taken, wanted, propose=drafter(draft, wanted, said), stagger=1, launch=steps)
    assert [one.token_ids for one in outcomes] == [one.token_ids for one in said]
    assert isinstance(taken, CapturedRunner) and any(bucket.common for bucket in taken._captured)


@pytest.mark.parametrize("draft", ["none", "knowing"])
def test_captured_steps_over_latents(draft: str) -> None:
    """Without experts, whose products in fp32 transformers takes through the host, where no graph can follow."""
    name = "v2, one dense layer"
    wanted = requests(SAMPLINGS["greedy"])
    said = run(make_runner(make_latent(name).cuda(), attention="triton"), wanted)
    taken, steps = captured(make_runner(make_latent(name).cuda(), attention="triton"))
    assert taken.latent
    outcomes = run(taken, wanted, propose=drafter(draft, wanted, said), stagger=3, launch=steps)
    assert [one.token_ids for one in outcomes] == [one.token_ids for one in said]


@pytest.mark.parametrize("name", ["mistral, window", "gemma3", "gemma4", "gpt_oss"])
@pytest.mark.parametrize("draft", ["none", "knowing"])
@pytest.mark.parametrize("selects", [False, True], ids=["host rows", "device rows"])
def test_captured_windows_in_few_frames(name: str, draft: str, selects: bool) -> None:
    """Tables are translated within the graphs, while frames change hands; texts come twice, so that the second time
    they begin behind what is left of the first."""
    wanted = [*requests(SAMPLINGS["greedy"]), *requests(SAMPLINGS["seeded"])]
    said = run(make_runner(windowed_model(name).cuda(), attention="triton"), wanted)
    room = {"num_pages": 128, "page_size": 16, "window_share": 0.2, "window_rows": 64}
    runner = runner_for(windowed_model(name).cuda(), None, attention="triton", **room)
    taken, steps = captured(runner, enable_device_row_selection=selects)
    frames = taken.cache.frames
    assert frames is not None and frames.frames == 26
    propose = drafter(draft, wanted, said)
    outcomes = run(taken, [*wanted, *wanted], propose=propose, stagger=4, launch=steps)
    assert [one.token_ids for one in outcomes] == [one.token_ids for one in said] * 2
    assert frames.used_frames == 0


@pytest.mark.parametrize("name", ["v2, one query projection", "v3"])
def test_captured_experts_over_latents(name: str) -> None:
    """In bf16 a row may take another expert by rounding: what is said is compared for most rows, not for all."""
    model = make_latent(name).bfloat16().cuda()
    alone = own_logits(model)
    taken, _ = captured(make_runner(model, attention="triton"))
    assert taken.latent
    check_runner(taken, alone)


@pytest.mark.parametrize("sampling", [SAMPLINGS["greedy"], SAMPLINGS["seeded"]], ids=["greedy", "seeded"])
@pytest.mark.parametrize("stagger", [0, 3], ids=["together", "staggered"])
def test_several_passes_at_once_say_what_single_ones_say(
    exact: tuple[ModelRunner, ModelRunner, DeviceSteps], sampling: SamplingParams, stagger: int
) -> None:
    eager, taken, steps = exact
    wanted = requests(sampling)
    outcomes = run(taken, wanted, stagger=stagger, launch=steps, passes=4)
    assert [one.token_ids for one in outcomes] == [one.token_ids for one in run(eager, wanted)]
    assert any(len(verdict.token_ids) > 1 for one in outcomes for verdict in one.verdicts)


@pytest.fixture(scope="module")
def looking_up() -> tuple[ModelRunner, DeviceSteps]:
    return captured(make_runner(make_tiny().cuda(), attention="triton"), enable_device_row_selection=True)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("draft", ["none", "random", "knowing"])
@pytest.mark.parametrize("stagger", [0, 3], ids=["together", "staggered"])
def test_what_the_device_drafts_changes_no_token(
    exact: tuple[ModelRunner, ModelRunner, DeviceSteps],
    looking_up: tuple[ModelRunner, DeviceSteps],
    sampling: SamplingParams,
    draft: str,
    stagger: int,
) -> None:
    eager, (taken, steps) = exact[0], looking_up
    wanted = [replace(one, token_ids=3 * one.token_ids, max_tokens=64) for one in requests(sampling)]
    said = run(eager, wanted)
    propose = drafter(draft, wanted, said)
    outcomes = run(taken, wanted, propose=propose, stagger=stagger, launch=steps, passes=4)
    assert [one.token_ids for one in outcomes] == [one.token_ids for one in said]
    if sampling is SAMPLINGS["greedy"]:
        assert sum(one.finished.totals.accepted_tokens for one in outcomes) > 0


@pytest.fixture(scope="module", params=KINDS)
def drafting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelRunner, ModelRunner, DeviceSteps]:
    """An eager runner, and passes behind which a head or an MTP module drafts."""
    heads = heads_of(request.param, tmp_path_factory.mktemp("target"))
    heads.model.cuda()
    sizes = {"num_pages": 128, "page_size": 16, "end_token_ids": (), "tokenizer": None}
    runner = drafting_runner(heads, attention="triton", **sizes)
    hooked = captured(runner, enable_device_row_selection=True, hooked=heads.layers)
    return make_runner(heads.model, attention="triton"), *hooked


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("passes", [1, 4])
def test_a_head_behind_passes_changes_no_token(
    drafting: tuple[ModelRunner, ModelRunner, DeviceSteps], sampling: SamplingParams, passes: int
) -> None:
    eager, taken, steps = drafting
    wanted = [replace(one, token_ids=3 * one.token_ids, max_tokens=64) for one in requests(sampling)]
    said = run(eager, wanted)
    outcomes = run(taken, wanted, stagger=3, launch=steps, passes=passes)
    assert [one.token_ids for one in outcomes] == [one.token_ids for one in said]
    table = taken.node_table
    assert table is not None and (table.tables[:, 1] > 8).sum() >= len(wanted), "every sequence had a tree"


def test_nothing_is_captured_while_requests_run(
    looking_up: tuple[ModelRunner, DeviceSteps], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the sizes are captured ahead, so is what follows them: a message would wait for it."""
    taken, steps = looking_up
    # One row, one with three looked up, and a prompt's chunk, of one sequence each.
    wanted = [
        replace(one, token_ids=one.token_ids[:16], max_draft_nodes=3) for one in requests(SAMPLINGS["greedy"])[2:3]
    ]
    wanted += [replace(wanted[0], sampling=SAMPLINGS[name]) for name in ("seeded", "filtered")]
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: pytest.fail("captured while a request ran"))
    for one in wanted:
        for draft in ("none", "random"):
            run(taken, [one], propose=drafter(draft, [one], []), launch=steps)


@pytest.mark.parametrize("sampling", [SAMPLINGS["greedy"], SAMPLINGS["penalties"]], ids=["greedy", "penalties"])
def test_forms_on_captured_steps(sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of forms are plain decoding's, in fewer passes, and nothing is captured once pauses were long enough."""
    model, tokenizer = make_tiny(vocab_size=FORM_VOCABULARY, eos_token_id=2), trained_tokenizer()
    of_forms = {"num_pages": 256, "page_size": 16, "attention": "triton"}
    eager = runner_for(model.cuda(), tokenizer, **of_forms)
    taken, steps = captured(runner_for(model, tokenizer, **of_forms), enable_device_row_selection=True)
    forms = [StructuredOutput(json_schema=json.dumps(SCHEMAS[name])) for name in ("flat", "nested", "recursion")]
    shaped = [replace(sampling, ignore_eos=False, structured_output=form) for form in forms]
    wanted = [request((5, 9, 14), 50, sampling=each) for each in [*shaped, SAMPLINGS["greedy"]]]
    said = run(eager, [replace(one, speculate=False) for one in wanted])
    while steps.use_pause():
        pass
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: pytest.fail("captured while a request ran"))
    for stagger in (0, 3):
        outcomes = run(taken, wanted, launch=steps, stagger=stagger)
        assert [one.token_ids for one in outcomes] == [one.token_ids for one in said]
        counts = [[one.finished.totals.steps for one in each[: len(forms)]] for each in (outcomes, said)]
        assert sum(counts[0]) < 0.9 * sum(counts[1])


def test_rejection_on_the_device_decides_as_on_the_host(
    exact: tuple[ModelRunner, ModelRunner, DeviceSteps], monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, taken, steps = exact
    # So cold that most of what is drafted from greedy answers is kept.
    wanted = requests(SamplingParams(temperature=0.05, seed=3, ignore_eos=True), VerificationMode.REJECTION)
    draft = drafter("knowing", wanted, run(eager, requests(SAMPLINGS["greedy"])))
    on_host = HostSteps(eager)
    on_host.in_background = True
    host = run(eager, wanted, propose=draft, launch=on_host)
    assert sum(one.finished.totals.accepted_tokens for one in host) > 0
    # A step launched before the last one's results has no tree of those sequences, and how often that pays is measured:
    # either way the distribution is the same, and the text is not.
    monkeypatch.setattr(device_executor._OnDevice, "can_launch_before_results", False)
    device = run(taken, wanted, propose=draft, launch=steps)
    for one, other in zip(host, device, strict=True):
        assert one.token_ids == other.token_ids
        assert [v.accepted_rows for v in one.verdicts] == [v.accepted_rows for v in other.verdicts]


def test_engines_of_one_model_do_not_write_to_each_other(exact: tuple[ModelRunner, ModelRunner, DeviceSteps]) -> None:
    """What follows a pass is captured for each: its graphs hold the addresses of one engine's verdicts."""
    eager, taken, steps = exact
    wanted = requests(SamplingParams(ignore_eos=True))
    said = run(eager, wanted)
    draft = drafter("knowing", wanted, said)
    other = DeviceSteps(taken, max_sequences=SEQUENCES, max_rows=ROWS)
    for launch in (steps, other, steps):
        outcomes = run(taken, wanted, propose=draft, launch=launch)
        assert [one.token_ids for one in outcomes] == [one.token_ids for one in said]


def test_no_bit_depends_on_the_batch_when_that_is_asked_for() -> None:
    """In bf16, where a pass of another shape would round differently: alone, together, and with chains of drafts."""
    model = make_tiny("llama", hidden_size=256, head_dim=64, intermediate_size=512).to(torch.bfloat16).cuda()
    plain = runner_for(model, None, num_pages=128, page_size=16, attention="triton", invariant=True)
    taken, steps = captured(plain, invariant=True)
    wanted = [replace(one, max_tokens=64) for one in requests(SAMPLINGS["seeded"])]
    alone = [outcome for one in wanted for outcome in run(taken, [one], launch=steps)]
    together = run(taken, wanted, launch=steps, stagger=2)
    propose = drafter("knowing", wanted, alone)
    drafted = run(taken, wanted, propose=propose, config=replace(engine_config(), batch_invariant=True), launch=steps)
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert [one.token_ids for one in drafted] == [one.token_ids for one in alone]
    assert sum(one.finished.totals.accepted_tokens for one in drafted) > 40


def exchange(runner: ModelRunner, folder: Path) -> None:
    """Write the folder's weights into the runner's model, from page-locked memory."""
    slots, memory = weight_slots(runner.network), HostMemory(runner.device)
    weights = read_weights(folder, specs_of(slots), memory)
    memory.lock()
    assert memory.locked_bytes >= sum({one.data_ptr(): one.nbytes for one in weights.values()}.values())
    assert all(tensor.is_pinned() for tensor in weights.values())
    write_weights(slots, weights, torch.device("cuda"), lambda: None)
    locked = next(iter(weights.values()))
    memory.release()
    deadline = time.monotonic() + HUNG_SECONDS
    while memory.locked_bytes:
        assert time.monotonic() < deadline, "the memory was not given back"
        time.sleep(0.01)
    assert not locked.is_pinned()


@pytest.mark.parametrize("invariant", [False, True], ids=["fused", "invariant"])
def test_captured_steps_go_on_with_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invariant: bool
) -> None:
    """Graphs that were captured before an exchange compute what graphs that are captured behind it do."""
    # So that most tensors reach across pieces that are locked by themselves.
    monkeypatch.setattr("target_service.model.weights.host_memory.PIECE", 64 << 10)
    # As large as fused layers are.
    tiny = make_tiny("llama", hidden_size=256, head_dim=64, intermediate_size=512).to(torch.bfloat16)
    new = other_weights(tiny)
    new.save_pretrained(tmp_path)
    wanted = requests(SAMPLINGS["seeded"])
    said = []
    for model, exchanged in ((tiny, True), (new, False)):
        plain = runner_for(model.cuda(), None, num_pages=128, page_size=16, attention="triton", invariant=invariant)
        taken, steps = captured(plain, invariant=invariant)
        if exchanged:
            before = run(taken, wanted, launch=steps)
            exchange(taken, tmp_path)
            assert [one.token_ids for one in before] != [one.token_ids for one in run(taken, wanted, launch=steps)]
        said.append([one.token_ids for one in run(taken, wanted, launch=steps)])
    assert said[0] == said[1]
