"""Time of a plain step of a model that several ranks share, beside one rank: random weights, the same for any number.

    python -m benchmarks.ranks.steps --shape llama-8b --ranks 1 2 --json FILE
    python -m benchmarks.ranks.steps --shape tiny --device cpu --ranks 1 2      # a rehearsal

Each number of ranks has its own processes, one after the other. Times are of steps through `ModelRunner.forward`: from
the call until the likeliest tokens are on the host, and from step to step where each is launched before the last one is
read; on GPUs steps are captured. `error` is the relative difference of
logits between a number of ranks and the first one, over the same tokens and empty caches.
"""

from __future__ import annotations

import sys
import time
import zlib
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.steps import (
    CONTEXT,
    PAGE_SIZE,
    StepLoad,
    error,
    figures_of,
    likeliest,
    step,
    timeline_of,
)
from benchmarks.random_models.shapes import SHAPES, config_of
from benchmarks.shared.report import parser_of, show, write_json
from outrider.devices import choose_device
from outrider.processes.python import module_command
from outrider.runtime import configure_logging, leave
from target_service.config import TargetConfig
from target_service.model.loading.loader import RankGroupLink
from target_service.model.ranks.following import follow
from target_service.model.ranks.leading import start_ranks
from target_service.model.runner import ModelRunner, runner_over
from target_service.model.support import has_latents
from tree_models.building import build
from tree_models.families import describe
from tree_models.layers.decoder import Decoder
from tree_models.layers.placing import Placement
from tree_models.ranks.decoder import build_rank
from tree_models.slots import specs_of
from tree_models.weights.checkpoint import StoredTensor

LOADS = (StepLoad((1,)), StepLoad((1,) * 8), StepLoad((1,) * 32), StepLoad((1,) * 64), StepLoad((64,)))
SEQUENCES = 64
STEPS = 200


class RandomTensors:
    """A checkpoint of random tensors, each drawn by its name. A `TensorSource`."""

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        """Of the names and shapes of `decoder`."""
        self.stored = {name: StoredTensor(spec.shape, "BF16") for name, spec in specs_of(decoder.slots()).items()}
        self._device = device

    def read(self, name: str) -> Tensor:
        """See `TensorSource.read`."""
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        numbers = torch.randn(self.stored[name].shape, generator=generator, device=self._device) * 0.02
        return (numbers + 1 if "norm" in name else numbers).bfloat16()


def load_random(config: TargetConfig, link: RankGroupLink | None) -> ModelRunner:
    """The rank's part of a model of the shape that `config.model` names, with layers after a colon."""
    shape, _, layers = config.model.partition(":")
    settings, device = config_of(shape, int(layers) if layers else None), torch.device(config.device)
    description = describe(settings)
    assert description is not None, "the shapes are of families with an entry"
    choose_device(config.device)
    meta = Placement(torch.device("meta"), torch.bfloat16, latent=has_latents(settings))
    tensors = RandomTensors(Decoder(description.spec, description.names, meta), device)
    place = Placement(device, getattr(torch, config.dtype), latent=meta.latent, ranks=link)
    decoder = (build if link is None else build_rank)(description, tensors, place)
    pages = SEQUENCES * -(-(CONTEXT + 64) // PAGE_SIZE)
    attention: Any = "triton" if device.type == "cuda" else "torch"
    runner = runner_over(decoder, None, num_pages=pages, page_size=PAGE_SIZE, end_token_ids=(), attention=attention)
    if device.type == "cuda":
        from target_service.model.cuda_graphs.runner import CapturedRunner, CaptureOptions
        from tree_models.fused.preparing import LayerOptions

        runner = CapturedRunner(runner, CaptureOptions(64, SEQUENCES, LayerOptions(compiled=False)))
    runner.attach(link)
    return runner


@torch.inference_mode()
def measured(runner: ModelRunner, load: StepLoad, steps: int) -> tuple[dict[str, Any], Tensor]:
    """Milliseconds of steps that are waited for, and of steps each of which is launched before the last is read, as the
    engine does; and the logits [rows, V] of one."""
    batches = [step(load, runner.vocabulary_size, seed) for seed in range(8)]
    waited, ahead = list[float](), list[float]()
    for count in range(steps + 5):
        before = time.perf_counter()
        likeliest(runner.forward(batches[count % len(batches)])).cpu()
        waited.append((time.perf_counter() - before) * 1e3)
    last = likeliest(runner.forward(batches[0]))
    for count in range(steps + 5):
        before = time.perf_counter()
        chosen = likeliest(runner.forward(batches[count % len(batches)]))
        last.cpu()
        last = chosen
        ahead.append((time.perf_counter() - before) * 1e3)
    times = {"wall_ms": figures_of(waited[5:]), "ahead_ms": figures_of(ahead[5:])}
    return times, runner.forward(batches[0]).float().cpu()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--layers", type=int, help="so many layers; all by default")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--profile", action="store_true", help="also the launches of a layer, on a GPU")
    options = parser.parse_args()
    configure_logging("info")
    model = options.shape if options.layers is None else f"{options.shape}:{options.layers}"
    results: list[dict[str, Any]] = []
    first: dict[StepLoad, Tensor] = {}
    for ranks in options.ranks:
        config = TargetConfig(model=model, device=options.device, tensor_parallel=ranks)
        link = None
        if ranks == 1:
            runner = load_random(config, None)
        else:
            runner, link = start_ranks(config, load_random, module_command("benchmarks.ranks.steps"))
        for load in LOADS:
            times, logits = measured(runner, load, options.steps)
            result = {"ranks": ranks, **asdict(load), **times, "error": 0.0}
            result["error"] = error(logits, first.setdefault(load, logits))
            results.append(result)
            shown = ", ".join(f"{name} {one['median']:.3f}" for name, one in times.items())
            show(f"{ranks} ranks, {load}: {shown}, error {result['error']:.4f}")
            if options.profile and options.device != "cpu" and load in LOADS[::2]:
                result["timeline"] = timeline_of(runner, load, runner.network.layer_count)
                parts = [one for one in result["timeline"] if one["part"] == "layer"]
                show("; ".join(f"{one['kernel'][:24]} {one['us']:.1f}" for one in parts))
            if options.json:
                # After each, as the next may fail.
                write_json(options.json, {"model": model, "results": results})
        if link is not None:
            link.close()
        del runner
        if options.device != "cpu":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].isdigit():
        follow(int(sys.argv[1]), load_random)
    else:
        main()
        # At the interpreter's end NCCL waits for graphs that hold its calls.
        leave(0)
