"""Whole answers of servers that run, through HTTP: what users get from the first request on.

    outrider up --model MODEL --http 8000
    python -m benchmarks.serving.whole_answers --url http://127.0.0.1:8000 --model MODEL --tokenizer FOLDER
        [--loads loop1,loop8,loop32,shared8,turns8,long8,rate16] [--peer http://127.0.0.1:8200] [--seed 1] [--json FILE]

The same work for any server with `/v1/completions`, so that another one (vLLM, say) can be measured beside it with
`--peer`: then each load is run on both, one after the other, and shown as a multiple of the peer's. Prompts are token
ids, answers greedy and of a fixed length. Before the loads a server answers some other prompts, which count nowhere.

    loopC    C streams, each with a short prompt of a chat and 128 tokens to answer, and then the next one
    sharedC  the same behind 3,000 tokens that all prompts share, 64 to answer
    longC    the same with prompts of 6,000 tokens, 32 to answer
    turnsC   C conversations of four turns, each of which sends all before it, 96 to answer
    rateR    R requests a second for twelve seconds, by Poisson, a fifth of them of 2,500 tokens, 128 to answer
    formsC   C streams, each with a short prompt of a chat and a form of seven fields to fill in by its JSON Schema
    coldN    N prompts of 6,000 tokens, one after the other, 8 to answer
    keptN    those of coldN again, with 32 tokens more behind each: behind that load, what kept prompts spare

Tokens a second are those of all answers over the time of the load, prompts included. Forms without white space have
fewer tokens, so `answers_per_second` compares two servers there, of forms that are valid JSON with all fields. Servers
keep prompts: a second run of the same services needs another `--seed`, which gives other texts to all loads but `loop`
and `forms`, of which those with as many streams have the same prompts.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.serving.http_answers import CompletionsClient, HttpAnswer
from benchmarks.shared.report import comma_separated, parser_of, percentile, provenance, record_table, show, write_json
from benchmarks.shared.workload import Prompt, chat_tokens, first_turn_tokens, form_schema, read_conversations

# Tokens of a short prompt at most. Chosen: long ones are loads of their own.
_SHORT = 1500
_RATE_SECONDS = 12.0
_TURNS, _TURN_CHARACTERS = 4, 300
# Tokens of a form at most. Chosen: twice what its longest values take.
_FORM_TOKENS = 256

# A prompt, its tokens to answer, and for a form its JSON Schema.
Ask = Callable[..., Awaitable[HttpAnswer]]


class WholeAnswers:
    """The loads, of the prompts of the shared file as a tokenizer encodes them."""

    def __init__(self, tokenizer: Any, seed: int = 0) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._texts = [one.turns[0] for one in read_conversations()]
        self._pieces = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in self._texts]
        encoded = [first_turn_tokens(tokenizer, one) for one in read_conversations()]
        self._short = [prompt for prompt in encoded if len(prompt) < _SHORT]

    def passage(self, tokens: int, seed: int) -> Prompt:
        """Text of so many tokens that no other seed has."""
        dice, text = random.Random(f"{self._seed}:{seed}" if self._seed else seed), list[int]()
        while len(text) < tokens:
            text += dice.choice(self._pieces)
        return tuple(text[:tokens])

    async def warm_up(self, ask: Ask) -> None:
        """Answers that count nowhere."""
        await self._loop(ask, 8, [self.passage(200, 99_000 + i) for i in range(16)], 64)

    async def run(self, load: str, ask: Ask) -> list[HttpAnswer]:
        """All answers of a load. Raises `ValueError` for a load that is none."""
        kind, count = parsed(load)
        if kind == "loop":
            return await self._loop(ask, count, self._prompts(max(8, 3 * count), 7 * count), 128)
        if kind == "forms":
            filled = partial(ask, schema=form_schema())
            return await self._loop(filled, count, self._prompts(max(8, 3 * count), 7 * count), _FORM_TOKENS)
        if kind == "shared":
            before = self.passage(3000, 7)
            return await self._loop(ask, count, [before + own for own in self._prompts(max(12, 4 * count))], 64)
        if kind == "long":
            prompts = [self.passage(6000, 1000 * count + i) for i in range(max(6, 2 * count))]
            return await self._loop(ask, count, prompts, 32)
        if kind in ("cold", "kept"):
            more = [self.passage(32, 71_000 + i) if kind == "kept" else () for i in range(count)]
            prompts = [self.passage(6000, 70_000 + i) + behind for i, behind in enumerate(more)]
            return await self._loop(ask, 1, prompts, 8)
        if kind == "turns":
            talks = await asyncio.gather(*(self._talk(ask, number) for number in range(count)))
            return [answer for answers in talks for answer in answers]
        return await self._at_rate(ask, count)

    def _prompts(self, count: int, begin: int = 0) -> list[Prompt]:
        return [self._short[(begin + i) % len(self._short)] for i in range(count)]

    async def _loop(self, ask: Ask, streams: int, prompts: Sequence[Prompt], tokens: int) -> list[HttpAnswer]:
        left, answers = iter(prompts), list[HttpAnswer]()

        async def stream() -> None:
            for prompt in left:
                answers.append(await ask(prompt, tokens))

        await asyncio.gather(*(stream() for _ in range(streams)))
        return answers

    async def _talk(self, ask: Ask, number: int) -> list[HttpAnswer]:
        said, answers = self.passage(600, 50_000 + number), list[HttpAnswer]()
        for turn in range(_TURNS):
            text = self._texts[(number * _TURNS + turn) % len(self._texts)][:_TURN_CHARACTERS]
            said += chat_tokens(self._tokenizer, [{"role": "user", "content": text}])
            answers.append(await ask(said, 96))
            said += tuple(self._tokenizer(answers[-1].text, add_special_tokens=False)["input_ids"])
        return answers

    async def _at_rate(self, ask: Ask, rate: int) -> list[HttpAnswer]:
        dice, asked = random.Random(5 + self._seed), list[asyncio.Future[HttpAnswer]]()
        for number in range(int(rate * _RATE_SECONDS)):
            short = self._short[(3 * number + 1) % len(self._short)]
            prompt = short if dice.random() < 0.8 else self.passage(2500, 9000 + number)
            asked.append(asyncio.ensure_future(ask(prompt, 128)))
            await asyncio.sleep(dice.expovariate(rate))
        return list(await asyncio.gather(*asked))


def parsed(load: str) -> tuple[str, int]:
    """The kind of a load, and its number. Raises `ValueError` for a load that is none."""
    found = re.fullmatch(r"(loop|shared|long|turns|rate|forms|cold|kept)([1-9][0-9]*)", load)
    if found is None:
        raise ValueError(f"expected loopC, sharedC, longC, turnsC, rateR, formsC, coldN or keptN, got {load!r}")
    return found[1], int(found[2])


def figures(answers: Sequence[HttpAnswer], seconds: float) -> dict[str, float]:
    """What users got of a load that took so many `seconds`: tokens a second, and milliseconds."""
    firsts = [1e3 * one.first for one in answers]
    each = [1e3 * one.seconds_a_token for one in answers]
    gaps = [1e3 * gap for one in answers for gap in one.gaps] or [0.0]
    return {
        "answers": len(answers),
        "tokens_per_second": round(sum(one.tokens for one in answers) / seconds, 1),
        "answers_per_second": round(sum(not one.broken for one in answers) / seconds, 2),
        "broken_forms": sum(one.broken for one in answers),
        "first_p50_ms": round(percentile(firsts, 0.5), 2),
        "first_p99_ms": round(percentile(firsts, 0.99), 2),
        "ms_a_token_p50": round(percentile(each, 0.5), 2),
        "gap_p99_ms": round(percentile(gaps, 0.99), 2),
    }


async def measure(answers: WholeAnswers, load: str, ask: Ask) -> dict[str, float]:
    """The figures of a load."""
    begun = time.perf_counter()
    found = await answers.run(load, ask)
    return figures(found, time.perf_counter() - begun)


async def compare(answers: WholeAnswers, loads: Sequence[str], servers: dict[str, Ask]) -> list[dict[str, Any]]:
    """A row of each load and server, and of each server but the last its tokens a second to the last one's."""
    for ask in servers.values():
        await answers.warm_up(ask)
    rows: list[dict[str, Any]] = []
    for load in loads:
        found = {name: await measure(answers, load, ask) for name, ask in servers.items()}
        peer = list(found.values())[-1]["tokens_per_second"]
        for name, one in found.items():
            beside = {"to_peer": round(one["tokens_per_second"] / peer, 3)} if len(servers) > 1 else {}
            rows.append({"load": load, "server": name, **one, **beside})
            show(" ".join(f"{key} {value}" for key, value in rows[-1].items()))
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True, help="as the server calls it")
    parser.add_argument("--tokenizer", required=True, help="folder of the model's tokenizer")
    parser.add_argument("--loads", type=comma_separated(str), default=["loop1", "loop8", "loop32", "loop64", "loop128"])
    parser.add_argument("--peer", default="", help="another server's URL")
    parser.add_argument("--peer-model", default="", help="as that one calls it; by default the same")
    parser.add_argument("--seed", type=int, default=0, help="of the texts that prompts are made of, for a second run")
    options = parser.parse_args()
    for load in options.loads:
        parsed(load)
    # Only here: it takes seconds to import.
    from transformers import AutoTokenizer

    servers: dict[str, Ask] = {options.url: CompletionsClient(options.url, options.model).ask}
    if options.peer:
        servers[options.peer] = CompletionsClient(options.peer, options.peer_model or options.model).ask
    answers = WholeAnswers(AutoTokenizer.from_pretrained(options.tokenizer), options.seed)
    rows = asyncio.run(compare(answers, options.loads, servers))
    show(record_table(rows))
    write_json(options.json, {**provenance("serving.whole_answers", ["transformers"]), "rows": rows})


if __name__ == "__main__":
    main()
