"""Time of what an EAGLE-3 head does behind a pass of its target, on one GPU: reading it, and growing trees.

Weights are random, those of the target and of the head in the shape of Llama 3 8B and its published heads. No sequence
is under way: rows are computed all the same, and attention has no keys to read. Captured graphs are replayed. Trees
have fixed levels, all of which are grown; with `--left-out`, where trees may end early all levels but the first are
left out.

    python -m benchmarks.heads.pass_drafting --json FILE
    python -m benchmarks.heads.pass_drafting --passes 32x1:1 64x4:4 --layers 1 --left-out
    python -m benchmarks.heads.pass_drafting --passes 128x16:8 --layers 4 --profile
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.engine.steps import decoder_of
from benchmarks.random_models.shapes import config_of
from benchmarks.shared.machine import describe
from benchmarks.shared.report import parser_of, show, write_json
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_config import HeadConfig
from draft_service.in_pass import InPassHead
from draft_service.neural.cuda_graphs.pass_drafter import shape_for
from target_service.execution.pass_drafting import PassDrafting
from target_service.model.cuda_graphs.runner import CapturedRunner, CaptureOptions
from target_service.model.cuda_graphs.sizes import Bucket
from target_service.model.forward import ForwardPass
from target_service.model.runner import runner_over
from tree_kernels.graph_capture import GraphCapture
from tree_kernels.verification import DeviceVerifier
from tree_models.layers.placing import Placement

# Rows and sequences of captured passes, and how many of these are under way.
PASSES = ("1x1:1", "32x1:1", "64x4:4", "128x16:8", "128x16:16", "256x64:32", "256x64:64", "256x256:128", "768x64:32")
PAGE_SIZE, LAYERS, MAX_SEQUENCES, MAX_ROWS = 16, (1, 15, 28), 256, 1024
DRAFT_VOCABULARY = 32000


def head_of(hidden: int, intermediate: int, vocabulary: int, kept: int, device: torch.device) -> EagleHead:
    """A head of random weights whose layer comes behind `kept` others in the cache."""
    config = HeadConfig(
        kind="eagle3", hidden_size=hidden, intermediate_size=intermediate, num_heads=32, num_kv_heads=8, head_dim=128,
        vocab_size=vocabulary, draft_vocab_size=DRAFT_VOCABULARY, target_hidden_size=hidden, num_features=len(LAYERS),
        feature_layers=LAYERS,
    )  # fmt: skip
    ids = torch.arange(DRAFT_VOCABULARY, device=device) * (vocabulary // DRAFT_VOCABULARY)
    head = EagleHead(config, ids, Placement(device, torch.bfloat16), kept)
    generator = torch.Generator(device).manual_seed(1)
    for name, weight in head.weights().items():
        drawn = torch.randn(weight.shape, generator=generator, device=device) * 0.02
        weight.copy_(drawn + 1 if "norm" in name else drawn)
    head.prepare(int8=True)
    return head.eval()


class DraftedPasses:
    """A captured target whose passes draft."""

    def __init__(self, layers: int | None, buckets: set[Bucket], *, leaves_out: bool = False) -> None:
        device, config = torch.device("cuda"), config_of("llama-8b", layers)
        decoder = decoder_of(config, device, torch.bfloat16)
        head = head_of(config.hidden_size, config.intermediate_size, config.vocab_size, len(decoder.layers), device)
        read = tuple(min(layer, len(decoder.layers) - 1) for layer in LAYERS)
        drafter = InPassHead(head, read, EagleConfig(cuda_graphs=True))
        drafter.leaves_out = leaves_out
        sizes: dict[str, Any] = {"num_pages": 1024, "page_size": PAGE_SIZE, "end_token_ids": ()}
        runner = runner_over(decoder, None, **sizes, attention="triton", in_pass=drafter)
        runner.enable_device_row_selection(MAX_SEQUENCES)
        self.tree = EagleConfig(cuda_graphs=True).tree
        self.runner = CapturedRunner(runner, CaptureOptions(MAX_ROWS, MAX_SEQUENCES, hooked=read))
        self.runner.capture(buckets)
        assert self.runner.node_table is not None
        self.drafting = PassDrafting(self.runner, drafter, self.runner.node_table, MAX_ROWS)
        self.verdicts = DeviceVerifier(device, config.vocab_size, MAX_SEQUENCES, MAX_ROWS).verdicts
        self._graphs = GraphCapture(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def replay_of(self, done: ForwardPass, sequences: int, *, grows: bool) -> Callable[[], None]:
        """What follows a pass, captured."""
        self.drafting.sequences, self.drafting.grows = sequences, grows
        kind = self.drafting.kind(greedy=True)

        def move() -> None:
            self.runner.move_accepted(done.written, self.verdicts)

        graph, _ = self._graphs.capture(lambda: self.drafting.draft_behind(kind, done, self.verdicts, move))
        return graph.replay


def milliseconds(replay: Callable[[], None], times: int = 30) -> float:
    """Of one replay, the mean of consecutive ones."""
    replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(times):
        replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / times


def launches_of(replay: Callable[[], None], times: int = 5) -> list[tuple[str, float, float]]:
    """Kernels with their microseconds and launches in one replay, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(times):
            replay()
        torch.cuda.synchronize()
    took, count = Counter[str](), Counter[str]()
    for one in profile.events():
        if one.device_type.name == "CUDA":
            took[one.name] += one.time_range.end - one.time_range.start
            count[one.name] += 1
    return [(name, each / times, count[name] / times) for name, each in took.most_common()]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--passes", nargs="+", default=PASSES, help="ROWSxSEQUENCES:UNDER_WAY of captured passes")
    parser.add_argument("--layers", type=int, help="of the target; without it all 32")
    parser.add_argument("--left-out", action="store_true", help="levels are left out where trees may end early")
    parser.add_argument("--profile", action="store_true", help="also the kernels behind each pass")
    arguments = parser.parse_args()
    loads = [tuple(map(int, one.replace("x", ":").split(":"))) for one in arguments.passes]
    results: list[dict[str, Any]] = []
    with torch.inference_mode():
        sizes = {Bucket(rows, room) for rows, room, _ in loads}
        passes = DraftedPasses(arguments.layers, sizes, leaves_out=arguments.left_out)
        for rows, room, sequences in loads:
            captured = passes.runner._captured[Bucket(rows, room)]
            done = passes.runner._empty(captured)
            shape = shape_for(passes.tree, sequences, leaves_out=arguments.left_out)
            read, grown = (passes.replay_of(done, sequences, grows=grows) for grows in (False, True))
            times = {"target_ms": milliseconds(captured.graph.replay), "read_ms": milliseconds(read)}
            times["read_and_grow_ms"] = milliseconds(grown)
            of_tree = {"levels": shape.num_steps, "width": shape.width}
            results.append({"rows": rows, "room": room, "sequences": sequences, **of_tree, **times})
            show(
                "  ".join(
                    f"{name} {value:.3f}" if "ms" in name else f"{name} {value}" for name, value in results[-1].items()
                )
            )
            for name, us, count in launches_of(grown)[:30] if arguments.profile else ():
                show(f"    {us:8.1f} us {count:5.1f} x  {name[:100]}")
            settings = {"layers": arguments.layers, "left_out": arguments.left_out}
            write_json(arguments.json, {"machine": describe(), **settings, "results": results})


if __name__ == "__main__":
    main()
