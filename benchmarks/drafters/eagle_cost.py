"""Time of an EAGLE head to draft one tree per sequence, by shape of the head, tree, mode and number of sequences.

Weights and features are random, so that trees have all nodes that they may have; acceptance is not measured. In each
round the drafter gets the features of three committed tokens and drafts the next trees. On a GPU, trees of captured
graphs are first compared with those that eager passes grow level by level. A round with graphs is also timed in parts,
each ended by a synchronization: reading the committed tokens, loading the inputs, growing the trees on the device, and
copying them to the host.

    python -m benchmarks.drafters.eagle_cost --device cuda --json FILE
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks.shared.report import comma_separated, parser_of, show, write_json
from draft_service.drafters.base import DraftSequence
from draft_service.eagle.config import EagleConfig
from draft_service.eagle.drafter import EagleDrafter
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_config import HeadConfig
from draft_service.neural.cuda_graphs.drafting import CapturedDrafting
from outrider.sampling import LOSSLESS_MODES, SamplingParams, VerificationMode
from outrider.tree import TokenTree
from tree_models.layers.placing import Placement


def _shape(
    hidden: int, inner: int, heads: int, kv_heads: int, width: int, vocabulary: int, draft_vocabulary: int,
    feature_layers: tuple[int, int, int],
) -> HeadConfig:  # fmt: skip
    return HeadConfig(
        "eagle3", hidden, inner, heads, kv_heads, width, vocab_size=vocabulary, draft_vocab_size=draft_vocabulary,
        target_hidden_size=hidden, num_features=3, feature_layers=feature_layers,
    )  # fmt: skip


SHAPES = {
    "smollm2-135m": _shape(576, 1536, 9, 3, 64, 49152, 16384, (1, 14, 26)),
    "llama-8b": _shape(4096, 14336, 32, 8, 128, 128256, 32000, (1, 15, 28)),
    # For rehearsals.
    "tiny": _shape(64, 128, 4, 2, 16, 1000, 500, (1, 2, 3)),
}
# Steps, topk, nodes and frontier; the first two are the defaults, without and with captured graphs.
TREES = {
    "tree 12": (3, 4, 12, 0),
    "tree 239": (8, 8, 239, 32),
    "chain 5": (5, 1, 5, 0),
    "chain 7": (7, 1, 7, 0),
    "tree 32": (6, 8, 32, 0),
    "tree 60": (7, 10, 60, 0),
}
CONTEXT, COMMITTED = 512, 3
LEAST_SAME = 0.3


@dataclass(frozen=True)
class Parts:
    """Median milliseconds of a round's parts."""

    read_ms: float
    load_ms: float
    device_ms: float
    back_ms: float


@dataclass(frozen=True)
class EagleCostFigure:
    """Milliseconds for the trees of all sequences: the median and the quartiles. Without graphs there are no parts."""

    shape: str
    tree: str
    mode: str
    sequences: int
    graphs: bool
    nodes: float
    first_ms: float
    low_ms: float
    median_ms: float
    high_ms: float
    parts: Parts | None


def make_head(config: HeadConfig, device: str, dtype: torch.dtype) -> EagleHead:
    torch.manual_seed(0)
    head = EagleHead(config, torch.arange(config.draft_vocab_size), Placement(torch.device(device), dtype))
    for name, weight in head.named_parameters():
        if weight.ndim == 1:
            weight.fill_(1.0)
        else:
            # Peaked enough that trees differ in shape, flat enough that they have all nodes.
            peak = 4.0 if name.startswith("lm_head") else 0.6
            weight.normal_(0.0, peak * weight.shape[1] ** -0.5)
    return head


class DraftLoad:
    """Sequences with random tokens and features."""

    def __init__(self, drafter: EagleDrafter, count: int, mode: VerificationMode) -> None:
        self._drafter = drafter
        self._random = torch.Generator().manual_seed(1)
        self._sequences = [self._open(number, mode) for number in range(count)]

    def round(self) -> tuple[float, Sequence[TokenTree]]:
        """Draft for all sequences, and commit tokens. Returns seconds and the trees."""
        start = time.perf_counter()
        trees = self._drafter.propose(self._sequences)
        seconds = time.perf_counter() - start
        for sequence in self._sequences:
            self._commit(sequence, COMMITTED)
        return seconds, trees

    @torch.inference_mode()
    def parts(self, drafting: CapturedDrafting) -> tuple[float, float, float, float]:
        """Seconds of one round's parts, see `Parts`."""
        device = drafting.network.device
        began = synchronize(device)
        self._drafter.absorb(self._sequences)
        read = synchronize(device)
        work, replays = drafting.tree_pass(self._sequences)
        work.load(self._sequences)
        loaded = synchronize(device)
        for part, replay in enumerate(replays):
            replay()
            work.send_back(part)
        grown = synchronize(device)
        work.fetch(work.parts - 1)
        fetched = time.perf_counter()
        for sequence in self._sequences:
            self._commit(sequence, COMMITTED)
        return read - began, loaded - read, grown - loaded, fetched - grown

    def close(self) -> None:
        for sequence in self._sequences:
            self._drafter.close(sequence)

    def _open(self, number: int, mode: VerificationMode) -> DraftSequence:
        sampling = SamplingParams(temperature=0.0 if mode is VerificationMode.GREEDY else 1.0)
        vocabulary = self._drafter.vocabulary_size
        sequence = DraftSequence(number, [0], 1, vocabulary, seed=number, mode=mode, sampling=sampling)
        self._drafter.open(sequence)
        self._commit(sequence, CONTEXT)
        return sequence

    def _commit(self, sequence: DraftSequence, tokens: int) -> None:
        assert self._drafter.features is not None and sequence.features is not None
        known = len(sequence.token_ids) - 1
        sequence.token_ids += torch.randint(sequence.vocabulary_size, (tokens,), generator=self._random).tolist()
        vectors = torch.randn(tokens, self._drafter.features.width, generator=self._random)
        sequence.features.append(vectors, known)


def synchronize(device: torch.device) -> float:
    """Wait for the device. Returns the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure(
    drafter: EagleDrafter, names: tuple[str, str], mode: VerificationMode, count: int, graphs: bool
) -> EagleCostFigure:
    load = DraftLoad(drafter, count, mode)
    first, _ = load.round()
    # For capturing, and for clocks to settle.
    for _ in range(3):
        load.round()
    rounds = [load.round() for _ in range(20)]
    drafting, parts = drafter.drafting, None
    if isinstance(drafting, CapturedDrafting) and mode is not VerificationMode.REJECTION:
        measured = zip(*(load.parts(drafting) for _ in range(20)), strict=True)
        parts = Parts(*(round(statistics.median(seconds) * 1e3, 3) for seconds in measured))
    load.close()
    low, median, high = statistics.quantiles([seconds * 1e3 for seconds, _ in rounds], n=4)
    nodes = statistics.mean(tree.drafted for _, trees in rounds for tree in trees)
    first_ms, low, median, high = (round(milliseconds, 3) for milliseconds in (first * 1e3, low, median, high))
    return EagleCostFigure(*names, mode.value, count, graphs, nodes, first_ms, low, median, high, parts)


def paths_of(tree: TokenTree) -> set[tuple[int, ...]]:
    """Every node as the tokens of its path."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


def check(eager: EagleDrafter, captured: EagleDrafter) -> None:
    """Compare the trees of graphs with those of eager passes. In bfloat16 some differ after near-ties.

    Raises:
        SystemExit: fewer than `LEAST_SAME` of the nodes are the same.
    """
    for mode in LOSSLESS_MODES:
        trees = [DraftLoad(drafter, 3, mode).round()[1] for drafter in (eager, captured)]
        both = [(paths_of(one), paths_of(other)) for one, other in zip(*trees, strict=True)]
        same = sum(len(one & other) for one, other in both) / sum(len(one) for one, _ in both)
        show(f"{mode.value}: graphs draft {same:.0%} of the nodes that eager passes draft")
        if same < LEAST_SAME and mode is not VerificationMode.REJECTION:
            raise SystemExit("these are too few")


def make_drafters(head: EagleHead, tree: str, options: argparse.Namespace) -> dict[bool, EagleDrafter]:
    """Started drafters by whether they use graphs: both on a GPU, checked against each other, else the eager one."""
    steps, topk, nodes, frontier = TREES[tree]
    drafters = {}
    for graphs in (False, True) if options.device.startswith("cuda") else (False,):
        config = EagleConfig(
            num_steps=steps,
            topk=topk,
            num_draft_tokens=nodes,
            frontier=frontier,
            head_weights=options.head_weights,
            min_score=0.0,
            dtype=options.dtype,
            device=options.device,
            cuda_graphs=graphs,
            captured_sequences=1,
        )
        drafters[graphs] = EagleDrafter(config, head)
        drafters[graphs].start()
    if len(drafters) > 1:
        check(drafters[False], drafters[True])
    return drafters


def line_of(figure: EagleCostFigure) -> str:
    """One line of text."""
    how = "at once" if figure.graphs else "by level"
    line = f"{figure.shape} {figure.tree} {figure.mode} x{figure.sequences} {how}: {figure.median_ms} ms"
    line += f" ({figure.low_ms} to {figure.high_ms}, first {figure.first_ms}), {figure.nodes:.1f} nodes"
    if figure.parts is None:
        return line
    return line + "; " + ", ".join(f"{name[:-3]} {value}" for name, value in asdict(figure.parts).items())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    words = comma_separated(str)
    parser.add_argument("--shapes", default="smollm2-135m,llama-8b", type=words, help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--sequences", default="1,8,32", type=comma_separated(int), help="numbers of sequences")
    parser.add_argument("--modes", default="greedy,coupled", type=comma_separated(VerificationMode))
    parser.add_argument("--trees", default="tree 12", type=words, help=f"of {', '.join(TREES)}")
    parser.add_argument("--head-weights", default="int8", choices=("own", "int8"), help="in passes of few rows")
    parser.add_argument("--threads", type=int, default=0, help="of PyTorch on a CPU; 0 leaves it to PyTorch")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    figures: list[EagleCostFigure] = []
    for shape in options.shapes:
        head = make_head(SHAPES[shape], options.device, getattr(torch, options.dtype))
        for tree in options.trees:
            drafters = make_drafters(head, tree, options).items()
            for (graphs, drafter), mode, count in itertools.product(drafters, options.modes, options.sequences):
                figures.append(measure(drafter, (shape, tree), mode, count, graphs))
                show(line_of(figures[-1]))
    write_json(options.json, [asdict(figure) for figure in figures])


if __name__ == "__main__":
    main()
