"""Time of a plain step on one GPU through `ModelRunner.forward`: eager, captured, compiled and fused.

Weights, keys and values are random. Before anything is timed, logits over fresh inputs are compared with those of the
same weights in fp32 and the reference attention. These take twice the weights' memory once more: an 8B shape with both
needs 141 GB; on a smaller device `--layers 8` checks some of its layers, and `--unchecked` times all.

Floors are the bytes that a step must read over the speed of a large copy, measured first.

    python -m benchmarks.engine.steps --json FILE
    python -m benchmarks.engine.steps --shapes llama-8b --modes fused --unchecked --trees 1 16 33 48 64
    python -m benchmarks.engine.steps --shapes qwen3-8b llama-8b --modes fused --unchecked --json FILE
    python -m benchmarks.engine.steps --shapes qwen3.5-9b --modes captured --layers 8 --json FILE
    python -m benchmarks.engine.steps --shapes llama-8b --modes fused --unchecked --prompts 768 2048 --profile

`--prompts` times passes that read so many rows of one prompt, of which the last has logits, behind each of `--contexts`
tokens. Their floor is that of their products where it is above that of their bytes.

Recurrent layers have random states of each sequence, into which a timed step folds one token, or four behind a tree.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from benchmarks.random_models.shapes import SHAPES, config_of
from benchmarks.shared.gpu_timing import FLOP_PER_US, copied_bytes_per_us
from benchmarks.shared.machine import describe
from benchmarks.shared.report import median_and_spread, parser_of, show, write_json
from target_service.model.cuda_graphs.runner import CapturedRunner, CaptureOptions
from target_service.model.forward import ForwardInput
from target_service.model.runner import ModelRunner, runner_over
from target_service.model.support import has_latents
from tree_kernels.attention import AttentionBatch, Backend
from tree_models.families import describe as describe_family
from tree_models.fused.preparing import LayerOptions
from tree_models.layers.decoder import Decoder
from tree_models.layers.placing import Placement
from tree_models.slots import specs_of

# In this order they can be run one after the other: a model stays prepared, and each mode needs what those before it
# prepared.
MODES: dict[str, CaptureOptions | None] = {
    "eager": None,
    "captured": CaptureOptions(layers=LayerOptions(compiled=False, fused=False)),
    "compiled": CaptureOptions(layers=LayerOptions(fused=False)),
    "fused": CaptureOptions(),
    "invariant": CaptureOptions(layers=LayerOptions(invariant=True)),
    # Without the minutes of compiling: for `--modes captured uncompiled`, not after a mode that compiles.
    "uncompiled": CaptureOptions(layers=LayerOptions(compiled=False)),
}
PAGE_SIZE = 16
CONTEXT = 1024
# That `--profile` takes its medians from.
_TIMELINE_STEPS = 5
# Relative error of logits in bf16 against fp32; with a wrong key, mask or position it is 1.
TOLERANCE = 0.15


@dataclass(frozen=True)
class StepLoad:
    """Rows of each sequence of a step; more than one are a random tree, or a part of a prompt."""

    rows: tuple[int, ...]
    context: int = CONTEXT  # keys of each sequence before its rows
    is_prompt: bool = False

    def __str__(self) -> str:
        if self.is_prompt:
            return f"prompt rows={sum(self.rows)} behind {self.context}"
        return f"c={len(self.rows)} rows={'/'.join(map(str, sorted(set(self.rows))))}"

    @property
    def pages(self) -> int:
        """Pages of all sequences, with as many for each."""
        return len(self.rows) * -(-(self.context + max(self.rows)) // PAGE_SIZE)


TIMED = (StepLoad((1,)), StepLoad((1,) * 4), StepLoad((1,) * 16), StepLoad((1,) * 64), StepLoad((16,)), StepLoad((64,)))
# Steps that fill a captured size only in part.
CHECKED = (StepLoad((3, 1, 9)), StepLoad((1,) * 5), StepLoad((37,)), StepLoad((2, 60)))


def decoder_of(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """A decoder of a configuration with random weights, the same for every call but for their type."""
    description = describe_family(config)
    assert description is not None, "the shapes are of families with an entry"
    place = Placement(device, dtype, latent=has_latents(config))
    decoder = Decoder(description.spec, description.names, place).eval()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for slot in decoder.slots():
            # Drawn in bf16, so that other types have the same numbers.
            drawn = [_drawn(name, spec.shape, generator) for name, spec in slot.specs.items()]
            slot.write([one.to(spec.dtype) for one, spec in zip(drawn, slot.specs.values(), strict=True)])
    return decoder


def _drawn(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers of transformers' usual size; weights of norms are near one, and biases near zero."""
    numbers = torch.randn(shape, generator=generator, device=generator.device) * 0.02
    return (numbers + 1 if "norm" in name and name.endswith("weight") else numbers).bfloat16()


def runner_of(config: PretrainedConfig, dtype: torch.dtype, attention: Backend, num_pages: int) -> ModelRunner:
    """A runner of such a decoder, with pages for every load."""
    decoder = decoder_of(config, torch.device("cuda"), dtype)
    return runner_over(decoder, None, num_pages=num_pages, page_size=PAGE_SIZE, end_token_ids=(), attention=attention)


def step(load: StepLoad, vocabulary: int, seed: int) -> ForwardInput:
    """A step of random tokens and trees after the context of each sequence, over shuffled pages."""
    rng = random.Random(seed)
    per_sequence = load.pages // len(load.rows)
    order = list(range(per_sequence * len(load.rows)))
    rng.shuffle(order)
    starts, positions, slots, trees, pages = [0], [], [], [], []
    for index, rows in enumerate(load.rows):
        own = order[index * per_sequence : (index + 1) * per_sequence]
        parents = (0, *(row - 1 if load.is_prompt else rng.randrange(row) for row in range(1, rows)))
        depths = [0] * rows
        for row in range(1, rows):
            depths[row] = depths[parents[row]] + 1
        positions += [load.context + depth for depth in depths]
        slots += [own[t // PAGE_SIZE] * PAGE_SIZE + t % PAGE_SIZE for t in range(load.context, load.context + rows)]
        starts.append(starts[-1] + rows)
        trees.append(None if load.is_prompt else parents)
        pages.append(tuple(own))
    attention = AttentionBatch(tuple(starts), (load.context,) * len(load.rows), tuple(pages), PAGE_SIZE, tuple(trees))
    tokens = tuple(rng.randrange(vocabulary) for _ in slots)
    states = tuple(range(1, len(load.rows) + 1))
    outputs = (len(tokens) - 1,) if load.is_prompt else tuple(range(len(tokens)))
    return ForwardInput(tokens, tuple(positions), tuple(slots), attention, outputs, state_slots=states)


def cached(runner: ModelRunner) -> list[Tensor]:
    """All that is kept of sequences."""
    states = runner.cache.recurrent
    kept = [] if states is None else [states.states, states.windows, states.inputs, states.gates, states.lengths]
    return [*runner.cache.keys, *runner.cache.values, *kept]


def fill_caches(runner: ModelRunner) -> None:
    """Random keys, values and states."""
    for cache in cached(runner):
        if cache.is_floating_point():
            cache.normal_()
    if runner.cache.recurrent is not None:
        # Logarithms of decays.
        runner.cache.recurrent.gates.uniform_(-1.0, 0.0)


def share_keys(runner: ModelRunner, reference: ModelRunner) -> None:
    """Copy the runner's keys, values and states to the reference."""
    for own, other in zip(cached(runner), cached(reference), strict=True):
        other.copy_(own)


def leave_to_fold(runner: ModelRunner, load: StepLoad) -> None:
    """Have the next step fold as many tokens into states as the one before accepts, with the next one."""
    if runner.cache.recurrent is not None:
        folded = 4 if max(load.rows) > 1 and not load.is_prompt else 1
        runner.cache.recurrent.lengths.fill_(load.context - min(folded, load.context))


def error(logits: Tensor, expected: Tensor) -> float:
    return float((logits.float() - expected).norm() / expected.norm())


@torch.inference_mode()
def check(runner: ModelRunner, reference: ModelRunner, eager: ModelRunner | None, seed: int) -> list[dict[str, Any]]:
    """Relative errors of logits against fp32, and rows with another likeliest token."""
    results = []
    for index, load in enumerate((*TIMED, *CHECKED)):
        batch = step(load, runner.vocabulary_size, seed + index)
        # Every step writes rows, into pages that are a prefix in later steps.
        leave_to_fold(runner, load)
        share_keys(runner, reference)
        expected = reference.forward(batch)
        # Then NaN shows what is not written.
        runner.forward(batch).fill_(float("nan"))
        logits = runner.forward(batch)
        result = {"load": str(load), "error": error(logits, expected)}
        result["other_argmax"] = int((logits.argmax(-1) != expected.argmax(-1)).sum())
        result["rows"] = len(batch.token_ids)
        if eager is not None:
            result["error_eager"] = error(ModelRunner.forward(eager, batch), expected)
        results.append(result)
    return results


def figures_of(values: list[float]) -> dict[str, float]:
    median, spread = median_and_spread(values)
    return {"median": median, "spread": spread, "n": len(values)}


def likeliest(logits: Tensor) -> Tensor:
    """[rows, V] -> [rows]: argmax. Rows are cut in parts, since a single one would occupy one processor for long."""
    rows, vocabulary = logits.shape
    parts = next(count for count in (64, 16, 4, 1) if vocabulary % count == 0)
    values, indices = logits.view(rows, parts, vocabulary // parts).max(-1)
    best = values.argmax(-1, keepdim=True)
    return (indices.gather(1, best) + best * (vocabulary // parts)).squeeze(1)


def time_step(runner: ModelRunner, load: StepLoad, seconds: float) -> dict[str, Any]:
    """Milliseconds of a step until its tokens are on the host, on the device, and until the host is free."""
    batches = [step(load, runner.vocabulary_size, seed) for seed in range(8)]
    wall, device, host = [], [], []
    begin = time.perf_counter()
    for count in range(400):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        leave_to_fold(runner, load)
        before = time.perf_counter()
        start.record()
        tokens = likeliest(runner.forward(batches[count % len(batches)]))
        end.record()
        free = time.perf_counter()
        tokens.cpu()
        after = time.perf_counter()
        if count >= 5:
            wall.append((after - before) * 1e3)
            host.append((free - before) * 1e3)
            device.append(start.elapsed_time(end))
        if count >= 15 and after - begin > seconds:
            break
    return {
        "wall_ms": figures_of(wall),
        "device_ms": figures_of(device),
        "host_ms": figures_of(host),
    }


@torch.inference_mode()
def replay_ms(runner: CapturedRunner, load: StepLoad, replays: int = 30) -> float:
    """Milliseconds of a captured step without the host: the mean of consecutive replays."""
    captured = runner._replay(step(load, runner.vocabulary_size, 1))
    assert captured is not None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(replays):
        captured.graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / replays


def timeline_of(runner: ModelRunner, load: StepLoad, layers: int) -> list[dict[str, Any]]:
    """The launches of one step in their order, those of all layers but the first as one layer: microseconds from the
    end of one launch to the end of the next, median over layers and five steps.

    Launches overlap, so the time of one from its own begin to its end would count some time twice.
    """
    batch = step(load, runner.vocabulary_size, 1)
    runner.forward(batch)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(_TIMELINE_STEPS):
            runner.forward(batch)
            torch.cuda.synchronize()
    on_device = (one for one in profile.events() if one.device_type.name == "CUDA")
    events = sorted(on_device, key=lambda one: one.time_range.end)
    length = len(events) // _TIMELINE_STEPS
    names = [one.name for one in events[-length:]]
    # What runs once in each layer: the first of such launches begins one.
    once = [name for name in dict.fromkeys(names) if names.count(name) == layers]
    begins = [place for place, name in enumerate(names) if layers > 2 and once and name == once[0]]
    period = begins[2] - begins[1] if begins else length
    times: dict[tuple[str, int], list[float]] = {}
    for run in range(_TIMELINE_STEPS):
        # Of a step that was profiled whole; the first may lack launches.
        own = events[len(events) - (run + 1) * length : len(events) - run * length]
        for place in range(1, length):
            took = own[place].time_range.end - own[place - 1].time_range.end
            if begins and begins[1] <= place < begins[-1] + period:
                key = "layer", (place - begins[1]) % period
            else:
                key = ("before", place) if not begins or place < begins[1] else ("behind", place)
            times.setdefault(key, []).append(took)
    place_of = {("layer", at): begins[1] + at for at in range(period)} if begins else {}
    return [
        {"part": key[0], "kernel": names[place_of.get(key, key[1])][:90], "us": median_and_spread(took)[0]}
        for key, took in sorted(times.items(), key=lambda one: place_of.get(one[0], one[0][1]))
    ]


def floor_ms(decoder: Decoder, config: PretrainedConfig, load: StepLoad, bytes_per_ms: float) -> float:
    """Milliseconds to read each weight that a step needs, and the cache, once at the memory's speed. A prompt's, also
    to multiply its rows by the weights and by the keys and values before them, in layers of plain attention."""
    rows = sum(load.rows)
    specs = specs_of(decoder.slots()).items()
    parameters = sum(prod(spec.shape) * share_read(name, config, rows) for name, spec in specs)
    # Of the embedding a step reads a few rows; a tied head is it.
    parameters -= config.vocab_size * config.hidden_size
    if decoder.layer_inputs is not None:
        parameters -= decoder.layer_inputs.table.numel()
    kept, states, scored = 0, 0, 0.0
    for shape, window in zip(decoder.cache_shapes, decoder.windows, strict=True):
        numbers = shape.heads * (shape.key_width + shape.value_width)
        kept += numbers * min(window or load.context, load.context) * len(load.rows)
        widths = config.num_attention_heads * (shape.key_width + shape.value_width)
        scored += widths * rows * (min(window or load.context, load.context) + rows / 2)
    if decoder.recurrent_layers is not None:
        layers, of_state = decoder.recurrent_layers
        states = 4 * layers * of_state.heads * of_state.key_width * of_state.value_width * len(load.rows)
    floor = float((2 * (parameters + kept) + states) / bytes_per_ms)
    if not load.is_prompt:
        return floor
    # But for the last row not by the head.
    inner = {name: spec.shape for name, spec in specs if spec.shape[0] != config.vocab_size}
    multiplied = rows * sum(prod(shape) * share_read(name, config, 1) for name, shape in inner.items()) + scored
    return max(floor, float(2 * multiplied / (FLOP_PER_US * 1e3)))


def share_read(name: str, config: PretrainedConfig, rows: int) -> float:
    """The share of a parameter that a step of `rows` reads, if each row chooses its experts at random."""
    if ".experts." not in name:
        return 1.0
    any_config: Any = config
    experts = getattr(config, "n_routed_experts", None) or any_config.num_experts
    return float(1.0 - (1.0 - any_config.num_experts_per_tok / experts) ** rows)


def time_load(runner: ModelRunner, load: StepLoad, seconds: float, floor: float) -> dict[str, Any]:
    """What `time_step` finds, the floor, and replays where steps are captured."""
    times = time_step(runner, load, seconds)
    medians = " ".join(f"{name} {times[name]['median']:.3f}" for name in times)
    result: dict[str, Any] = {**times, "floor_ms": floor}
    if isinstance(runner, CapturedRunner):
        result["replay_ms"] = replay_ms(runner, load)
        medians += f" replay {result['replay_ms']:.3f}"
    show(f"  {load!s:16s} {medians} floor {floor:.3f}, {times['device_ms']['median'] / floor:.3f} times")
    return result


def run_shape(
    shape: str,
    modes: list[str],
    loads: Sequence[StepLoad],
    seconds: float,
    *,
    layers: int | None,
    bytes_per_ms: float,
    checked: bool,
    profiled: bool,
) -> Iterator[dict[str, Any]]:
    """The result of each mode, as soon as it is measured."""
    config = config_of(shape, layers)
    num_pages = max(64 * (CONTEXT // PAGE_SIZE + 4), *(load.pages for load in loads))
    runner = runner_of(config, torch.bfloat16, "triton", num_pages)
    assert isinstance(runner.network, Decoder)
    floors = {str(load): floor_ms(runner.network, config, load, bytes_per_ms) for load in loads}
    reference = runner_of(config, torch.float32, "reference", num_pages) if checked else None
    fill_caches(runner)
    for number, mode in enumerate(modes):
        torch._dynamo.reset()
        options = MODES[mode]
        if options is not None:
            options = replace(options, max_rows=max(options.max_rows, *(sum(load.rows) for load in loads)))
        current = runner if options is None else CapturedRunner(runner, options)
        begin = time.perf_counter()
        for load in loads:
            current.forward(step(load, current.vocabulary_size, 0))
        prepared = time.perf_counter() - begin
        show(f"{shape} {mode}: first steps took {prepared:.1f} s")
        checks = []
        if reference is not None:
            checks = check(current, reference, runner if mode == "captured" else None, seed=1000 * number + 17)
            worst = max(checks, key=lambda one: one["error"])
            show(f"  worst error {worst['error']:.4f} at {worst['load']}")
        result: dict[str, Any] = {
            "shape": shape,
            "mode": mode,
            "layers": config.num_hidden_layers,
            "first_steps_s": prepared,
            "checks": checks,
            "times": {},
        }
        for load in loads:
            result["times"][str(load)] = time_load(current, load, seconds, floors[str(load)])
        device = {load: result["times"][str(load)]["device_ms"]["median"] for load in loads}
        trees = [load for load in loads if len(load.rows) == 1 and load.rows[0] > 1 and not load.is_prompt]
        result["trees_beside_one_row"] = {load.rows[0]: device[load] / device[loads[0]] for load in trees}
        for rows, ratio in result["trees_beside_one_row"].items():
            show(f"  a tree of {rows} rows takes {ratio:.3f} times a step of one")
        if profiled:
            result["timelines"] = {str(load): timeline_of(current, load, config.num_hidden_layers) for load in loads}
            for name, launches in result["timelines"].items():
                show_timeline(name, launches)
        yield result


def show_timeline(load: str, launches: list[dict[str, Any]]) -> None:
    """Print a layer's launches, and the sums of what lies before and behind the layers."""
    sums = {part: sum(one["us"] for one in launches if one["part"] == part) for part in ("before", "layer", "behind")}
    show(f"  {load}: us " + "  ".join(f"{part} {total:.1f}" for part, total in sums.items()))
    for one in launches:
        if one["part"] != "before":
            show(f"    {one['part']:7s} {one['us']:8.2f}  {one['kernel'][:80]}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["smollm2-135m", "llama-8b"], choices=list(SHAPES))
    usual = [mode for mode in MODES if mode != "uncompiled"]
    parser.add_argument("--modes", nargs="+", default=usual, choices=list(MODES))
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring, for each load")
    parser.add_argument("--trees", nargs="+", type=int, help="only one sequence, with trees of these rows, the first 1")
    parser.add_argument("--prompts", nargs="+", type=int, help="only so many rows of one prompt; needs --unchecked")
    parser.add_argument("--contexts", nargs="+", type=int, default=[0, 3072, 6144], help="tokens before those rows")
    parser.add_argument("--layers", type=int, help="of each shape; without it all that it has")
    parser.add_argument("--unchecked", action="store_true", help="not compared with fp32 first")
    parser.add_argument("--profile", action="store_true", help="also the times of a layer's launches")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    timed = tuple(StepLoad((rows,)) for rows in arguments.trees) if arguments.trees else TIMED
    if arguments.prompts:
        pairs = product(arguments.prompts, arguments.contexts)
        timed = tuple(StepLoad((rows,), context, is_prompt=True) for rows, context in pairs)
    loads = [asdict(load) for load in timed]
    bytes_per_ms = copied_bytes_per_us() * 1e3
    show(f"a copy reads and writes {bytes_per_ms / 1e9:.3f} TB/s")
    for shape in arguments.shapes:
        found = run_shape(
            shape, arguments.modes, timed, arguments.seconds, layers=arguments.layers, bytes_per_ms=bytes_per_ms,
            checked=not arguments.unchecked, profiled=arguments.profile,
        )  # fmt: skip
        for result in found:
            results.append(result)
            # After each result: the run may be cut off in a mode that takes minutes to compile.
            document = {"machine": describe(), "bytes_per_ms": bytes_per_ms, "loads": loads, "results": results}
            write_json(arguments.json, document)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
