"""vLLM on the same GPU, the same prompts and the same loops as `serving.py`: plain decoding and n-gram speculation.

    PYTHONPATH=protos:. python -m benchmarks.serving.vllm_peer --model FOLDER [--mode plain|ngram]
        [--concurrency 1,8,32,64] [--loops waves,closed,steps] [--json FILE]
    ... --shape CONFIG_FOLDER --prompt-tokens 1024     random weights of a config.json's shape

Written for vLLM 0.24.0, which needs torch 2.11.0. vLLM runs in this process, without a server and without prefix
caching, so that no answer is remembered: the comparison is with `serving.py --arrangements engine`. `waves` are
`LLM.generate` over a wave's prompts; in `closed` a request is added when another has ended, and times are those at
which `LLMEngine.step` returned its tokens. With `--shape` weights are random, as those of `serving.py
--random-weights`: then only ms per token means something, not speculation. The folder is one of
`shared/random_model.py --without-weights`; Qwen3.5's text part, which vLLM has with images alone, is made known to it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.random_models.weights import redraw
from benchmarks.serving.figures import LONG, SHORT, Share, TimedAnswer, closed_figures, line, step_figures, wave_figures
from benchmarks.shared.processes import await_turn
from benchmarks.shared.report import comma_separated, parser_of, settings_of, show, write_json
from benchmarks.shared.workload import Prompt, closed_requests, random_prompts, read_prompts, wave

# To be set before vLLM is imported: one process, no network, and no FlashInfer for sampling.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
_CONTEXT = 4096
_TEXT_OF_QWEN = "Qwen3_5ForCausalLM"


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `vllm.LLM`."""
    settings: dict[str, Any] = {
        "model": options.shape or options.model,
        "dtype": "bfloat16",
        "max_model_len": _CONTEXT,
        "gpu_memory_utilization": 0.6 if options.shape else 0.5,
        "enable_prefix_caching": False,
        "max_num_seqs": max(options.concurrency),
    }
    if options.shape:
        settings |= {"load_format": "dummy", "skip_tokenizer_init": True}
    if options.mode == "ngram":
        settings["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": options.ngram_tokens,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    settings |= options.engine
    return settings


class Peer:
    """vLLM behind the interface that `serving.engine.EngineAlone` has."""

    def __init__(self, llm: Any, params: Any, delta: Any, *, detokenize: bool) -> None:
        """`llm` is a `vllm.LLM`, `params` the class of its sampling parameters, and `delta` the kind of output with
        only the new tokens."""
        self._llm, self._params, self._delta, self._detokenize = llm, params, delta, detokenize
        self._number = 0
        # Of each answer of the latest wave.
        self.last_tokens: list[int] = []

    def wave(self, prompts: Sequence[Prompt], max_tokens: int) -> tuple[float, list[TimedAnswer]]:
        """Seconds for all, and their answers, of which only the end is known."""
        inputs = [{"prompt_token_ids": list(ids)} for ids in prompts]
        begin, started = time.perf_counter(), time.monotonic()
        outputs = self._llm.generate(inputs, self._sampling(max_tokens), use_tqdm=False)
        seconds, ended = time.perf_counter() - begin, time.monotonic()
        self.last_tokens = [one.outputs[0].token_ids[-1] for one in outputs]
        return seconds, [TimedAnswer(started, [ended], [len(one.outputs[0].token_ids)]) for one in outputs]

    def closed(self, requests: Sequence[tuple[Prompt, int]], concurrency: int) -> list[Share]:
        """Keep `concurrency` requests in flight: when an answer ends, the next request begins."""
        waiting = iter(requests)
        answers: dict[str, TimedAnswer] = {}
        for _ in range(concurrency):
            self._add(*next(waiting), answers)
        remaining = len(requests)
        while remaining:
            for output in self._llm.llm_engine.step():
                now, tokens = time.monotonic(), len(output.outputs[0].token_ids)
                if tokens:
                    # Some versions add a suffix to a request's name.
                    answer = answers[output.request_id.partition("-")[0]]
                    answer.times.append(now)
                    answer.counts.append(tokens)
                if output.finished:
                    remaining -= 1
                    following = next(waiting, None)
                    if following is not None:
                        self._add(*following, answers)
        return [Share(concurrency, list(answers.values()))]

    def _add(self, ids: Prompt, max_tokens: int, answers: dict[str, TimedAnswer]) -> None:
        self._number += 1
        name = str(self._number)
        answers[name] = TimedAnswer(time.monotonic(), [], [])
        params = self._sampling(max_tokens, output_kind=self._delta)
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": list(ids)}, params)

    def _sampling(self, max_tokens: int, **more: Any) -> Any:
        return self._params(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=self._detokenize, **more
        )


def measure(
    peer: Peer,
    prompts: Sequence[Prompt],
    options: argparse.Namespace,
    rows: list[dict[str, Any]],
    keep: Callable[[], None] = lambda: None,
) -> None:
    """Every loop at every concurrency; figures are appended to `rows`, and `keep` is called after each."""
    for concurrency in options.concurrency:
        for loop in options.loops:
            if loop == "waves":
                done = [
                    peer.wave(wave(prompts, number, concurrency), options.max_tokens)
                    for number in range(-1, options.waves)
                ]
                # The first wave of each size has cold caches. Times within an answer are not known.
                figures = wave_figures(done[1:]) | {"first_token_ms": None, "token_ms": None}
            elif loop == "steps":
                waves = [wave(prompts, number, concurrency) for number in range(-1, options.waves)]
                timed = [[peer.wave(one, count)[0] for count in (SHORT, LONG)] for one in waves]
                figures = step_figures(concurrency, [(shorter, longer) for shorter, longer in timed[1:]])
                figures["distinct_last_tokens"] = len(set(peer.last_tokens))
            else:
                requests = closed_requests(prompts, concurrency, options.max_tokens)
                figures = closed_figures(peer.closed(requests, concurrency))
            name = {"arrangement": "vllm", "mode": options.mode, "concurrency": concurrency}
            rows.append(name | figures)
            show(line(rows[-1]))
            keep()


def register_text_of_qwen(registry: Any) -> None:
    """Make Qwen3.5's part for text known to vLLM's registry of models."""
    from vllm.model_executor.models.interfaces import IsHybrid
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

    class TextOfQwen(Qwen3_5ForCausalLM, IsHybrid):  # type: ignore[misc]
        get_mamba_state_dtype_from_config = Qwen3_5ForConditionalGeneration.get_mamba_state_dtype_from_config
        get_mamba_state_shape_from_config = Qwen3_5ForConditionalGeneration.get_mamba_state_shape_from_config
        get_mamba_state_copy_func = Qwen3_5ForConditionalGeneration.get_mamba_state_copy_func

    registry.register_model(_TEXT_OF_QWEN, TextOfQwen)


def prompts_of(options: argparse.Namespace, count: int) -> list[Prompt]:
    """The prompts of `serving.py`: the shared ones, or `count` random ones."""
    if not options.prompt_tokens:
        return read_prompts(options.model, 0)
    return random_prompts(count, options.prompt_tokens, configuration(options)["vocab_size"])


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    """What is in the model's config.json."""
    found: dict[str, Any] = json.loads((Path(options.shape or options.model) / "config.json").read_text())
    return found


def describe_peer() -> dict[str, str]:
    """Device, versions and command line."""
    import torch
    import vllm

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": " ".join(sys.argv),
    }


def engine_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options of an engine and its prompts; see `checked`."""
    parser = parser_of(doc)
    parser.add_argument("--model", default="", help="folder of a model with its tokenizer")
    parser.add_argument("--shape", default="", help="folder with a config.json, for random weights")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="of random prompts")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--ngram-tokens", type=int, default=5, help="tokens that vLLM's n-gram speculation proposes")
    parser.add_argument("--engine", default="{}", type=json.loads, help="more arguments of vllm.LLM, as JSON")
    return parser


def checked(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of an `engine_parser`. Ends the script if they name no model."""
    options = parser.parse_args(arguments)
    if bool(options.model) == bool(options.shape) or (options.shape and not options.prompt_tokens):
        parser.error("name a --model, or a --shape with --prompt-tokens")
    return options


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = engine_parser(__doc__)
    parser.add_argument("--mode", default="plain", choices=("plain", "ngram"))
    parser.add_argument("--concurrency", default="1,8,32,64", type=comma_separated(int))
    parser.add_argument("--loops", default="waves,closed", type=comma_separated(str), help="waves, closed, steps")
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--turn", default="", help="load, write TURN.ready, and measure once there is TURN.go")
    return checked(parser, arguments)


def main() -> None:
    options = parse()
    prompts = prompts_of(options, (options.waves + 1) * max(options.concurrency))
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, ModelRegistry, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    shape = configuration(options) if options.shape else {}
    if _TEXT_OF_QWEN in shape.get("architectures", ()):
        register_text_of_qwen(ModelRegistry)
    begin = time.perf_counter()
    llm = LLM(**engine_options(options))
    if options.shape and options.engine.get("tensor_parallel_size", 1) == 1:
        # Several ranks have functions only by serialisation that is off by default, and keep vLLM's own numbers.
        drawn = llm.apply_model(partial(redraw, layers=shape["num_hidden_layers"]))
        show(f"{drawn} parameters drawn anew")
    started = time.perf_counter() - begin
    rows: list[dict[str, Any]] = []

    def keep() -> None:
        settings = settings_of(options)
        document = {"machine": describe_peer(), "settings": settings, "cores": os.cpu_count(), "started_s": started}
        write_json(options.json, document | {"results": rows})

    peer = Peer(llm, SamplingParams, RequestOutputKind.DELTA, detokenize=not options.shape)
    await_turn(options.turn)
    measure(peer, prompts, options, rows, keep)


if __name__ == "__main__":
    main()
