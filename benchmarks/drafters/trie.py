"""Times the n-gram trie: insertion, 16-node drafts, memory, on the source text of Python's standard library.

    python -m benchmarks.drafters.trie [--tokens 600000] [--json OUT]

Each draft is one call from Python, as in the drafter. Half of them are at random places of text that was inserted, half
of text that was not.
"""

from __future__ import annotations

import json
import platform
import re
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np

from benchmarks.shared.report import parser_of, show, write_json
from draft_service.ngram.config import TrieConfig
from draft_service.ngram.growth import TreeBounds, grow
from draft_service.ngram.prediction import UNIT
from draft_service.ngram.trie import NgramTrie
from outrider.machine import describe_commit

Clock = Callable[[], float]
# Words, runs of blanks and single signs: much like a byte-pair tokenizer's tokens of source text.
_TOKEN = re.compile(r"\w+|\s+|[^\w\s]")


def corpus(tokens: int) -> np.ndarray:
    """Token ids of the standard library's modules in order of name, numbered by first appearance. [tokens] int32."""
    numbers: dict[str, int] = {}
    ids: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts or "idlelib" in path.parts:
            continue
        for word in _TOKEN.findall(path.read_text(encoding="utf-8", errors="replace")):
            ids.append(numbers.setdefault(word, len(numbers)))
        if len(ids) >= tokens:
            return np.array(ids[:tokens], dtype=np.int32)
    raise SystemExit(f"the standard library has only {len(ids)} tokens")


def time_insertion(text: np.ndarray, config: TrieConfig, runs: int, clock: Clock) -> tuple[NgramTrie, list[float]]:
    """The trie, and microseconds per token of each run. Arrays grow as in service."""
    micros = []
    for _ in range(runs):
        trie = NgramTrie(config.depth, 1 << 26)
        begin = clock()
        trie.insert(text, weight=UNIT)
        micros.append((clock() - begin) / len(text) * 1e6)
    return trie, micros


def time_drafts(
    trie: NgramTrie, text: np.ndarray, inserted: int, config: TrieConfig, drafts: int, clock: Clock
) -> tuple[list[float], float]:
    """Microseconds of each draft, and the mean number of nodes."""
    rng = np.random.default_rng(0)
    evidence, nothing = config.evidence(), NgramTrie(2, 4).arrays()
    shape = TreeBounds(16, 16, config.breadth, config.min_score, False, 1.0)
    tree, scores = np.empty((2, 17), np.int32), np.empty(17, np.float64)
    tries, zero = (nothing, trie.arrays(), nothing), np.uint64(0)
    places = np.concatenate(
        [rng.integers(16, inserted, drafts // 2), rng.integers(inserted + 16, len(text), drafts // 2)]
    )
    contexts = [text[place - config.max_match : place].copy() for place in rng.permutation(places)]
    grow(tries, contexts[0], evidence, shape, zero, zero, tree, scores)
    micros, nodes = [], 0
    for context in contexts:
        begin = clock()
        rows = grow(tries, context, evidence, shape, zero, zero, tree, scores)
        micros.append((clock() - begin) * 1e6)
        nodes += rows - 1
    return micros, nodes / len(contexts)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=600_000, help="tokens inserted (default: 600000)")
    parser.add_argument("--drafts", type=int, default=20_000, help="drafts timed (default: 20000)")
    parser.add_argument("--runs", type=int, default=3, help="insertions of the whole text (default: 3)")
    parser.add_argument("--cpu-time", action="store_true", help="count the thread's CPU time, for a busy machine")
    arguments = parser.parse_args()
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    config = TrieConfig()
    text = corpus(arguments.tokens + 50_000)
    warm = NgramTrie(config.depth, 1 << 16)
    warm.insert(text[:512], weight=UNIT)
    trie, insertion = time_insertion(text[: arguments.tokens], config, arguments.runs, clock)
    drafts, nodes = time_drafts(trie, text, arguments.tokens, config, arguments.drafts, clock)
    quantiles = np.percentile(drafts, [50, 90, 99])
    figures = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "numba": numba.__version__,
        "commit": describe_commit(),
        "clock": "thread CPU time" if arguments.cpu_time else "wall",
        "tokens": arguments.tokens,
        "vocabulary": int(text.max()) + 1,
        "window": config.depth,
        "nodes_per_token": round(trie.nodes / arguments.tokens, 2),
        "bytes_per_token_used": round(
            (trie.used * 32 + trie.slots.nbytes * trie.used / len(trie.rows)) / arguments.tokens
        ),
        "bytes_per_token_allocated": round(trie.bytes / arguments.tokens),
        "insert_us_per_token": {
            "median": round(statistics.median(insertion), 3),
            "runs": [round(x, 3) for x in insertion],
        },
        "draft_16_us": {"p50": round(quantiles[0], 2), "p90": round(quantiles[1], 2), "p99": round(quantiles[2], 2)},
        "draft_nodes_mean": round(nodes, 1),
        "drafts": arguments.drafts,
    }
    show(json.dumps(figures, indent=2))
    write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
