"""Prompts by HTTP: log-probabilities as evaluations ask for them, their tokens, and the best of several answers."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest
import torch
from transformers import PreTrainedModel

import outrider

TEXT = "naïve <s>x"
# By the byte tokenizer of the tests.
IDS = [*(3 + byte for byte in "naïve ".encode()), 1, 3 + ord("x")]
CONTEXT = 4
HELLO = {"role": "user", "content": "hi"}


@torch.inference_mode()
def expected(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """[ids, V]: log-probabilities behind every token."""
    model.set_attn_implementation("eager")
    return torch.log_softmax(model(torch.tensor([ids]), use_cache=False).logits[0], dim=-1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [TEXT, IDS], ids=["text", "ids"])
async def test_an_echoed_prompt_has_its_log_probabilities(
    real: Any, model: str, tiny_model: PreTrainedModel, prompt: Any, stream: bool
) -> None:
    """As lm-evaluation-harness asks: it reads the context's tokens off the front, and the answer's off the end."""
    asked = {
        "model": model,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 2,
        "seed": 1,
        "echo": True,
    }
    if stream:
        events = [event.choices[0] async for event in await real.openai.completions.create(**asked, stream=True)]
        text = "".join(event.text for event in events)
        lists = [event.logprobs for event in events if event.logprobs is not None]
        own, tops, tokens, offsets = (
            [value for each in lists for value in getattr(each, name)]
            for name in ("token_logprobs", "top_logprobs", "tokens", "text_offset")
        )
    else:
        (choice,) = (await real.openai.completions.create(**asked)).choices
        text, lists = choice.text, choice.logprobs
        own, tops, tokens, offsets = lists.token_logprobs, lists.top_logprobs, lists.tokens, lists.text_offset
    logprobs = expected(tiny_model, IDS)
    assert own[0] is None and tops[0] is None and len(own) == len(tops) == len(tokens) == len(offsets) == len(IDS) + 1
    continuation = own[CONTEXT:-1]
    for place, found in enumerate(continuation, start=CONTEXT):
        assert found == pytest.approx(float(logprobs[place - 1, IDS[place]]), abs=2e-4)
        greedy = max(tops[place].items(), key=lambda top: top[1])
        assert greedy[1] == pytest.approx(float(logprobs[place - 1].max()), abs=2e-4)
        # Parts of characters have one name.
        if "\ufffd" not in tokens[place] + greedy[0]:
            assert (tokens[place] == greedy[0]) == (int(logprobs[place - 1].argmax()) == IDS[place])
    assert text.startswith(TEXT)
    # The second byte of a character stands behind it.
    assert offsets[:-1] == [0, 1, 2, 3, 3, 4, 5, 6, 9] and offsets[-1] == len(TEXT)


async def test_nothing_but_the_prompt(real: Any, model: str, tiny_model: PreTrainedModel) -> None:
    answer = await real.openai.completions.create(
        model=model, prompt=[IDS, IDS[:2]], max_tokens=0, logprobs=0, echo=True
    )
    assert [choice.text for choice in answer.choices] == [TEXT, "na"]
    assert [len(choice.logprobs.tokens) for choice in answer.choices] == [len(IDS), 2]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(IDS) + 2, 0)
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    # Whatever follows it, such as the end of text.
    ended = await real.openai.completions.create(model=model, prompt=TEXT, max_tokens=0, echo=True, logit_bias={2: 100})
    assert ended.choices[0].finish_reason == "length"
    logprobs = expected(tiny_model, IDS)
    own = [float(logprobs[place - 1, IDS[place]]) for place in range(1, len(IDS))]
    assert math.fsum(answer.choices[0].logprobs.token_logprobs[1:]) == pytest.approx(math.fsum(own), abs=2e-3)
    stream = await real.openai.completions.create(
        model=model, prompt=IDS, max_tokens=0, logprobs=0, echo=True, stream=True
    )
    assert "".join([event.choices[0].text async for event in stream]) == TEXT


async def test_prompt_logprobs_as_vllm_lists_them(real: Any, model: str) -> None:
    asked = {"model": model, "max_tokens": 1, "temperature": 0, "extra_body": {"prompt_logprobs": 1}}
    answer = await real.openai.completions.create(prompt=IDS, **asked)
    listed = answer.choices[0].model_extra["prompt_logprobs"]
    assert listed[0] is None and len(listed) == len(IDS)
    for token_id, entries in zip(IDS[1:], listed[1:], strict=True):
        best = [entry for entry in entries.values() if entry["rank"] == 1]
        assert len(best) == 1 and best[0]["logprob"] >= entries[str(token_id)]["logprob"]
    chat = await real.openai.chat.completions.create(messages=[{"role": "user", "content": "x"}], **asked)
    assert len(chat.model_extra["prompt_logprobs"]) == chat.usage.prompt_tokens


async def test_the_best_of_several_answers(real: Any, model: str) -> None:
    asked = {"model": model, "prompt": "a", "max_tokens": 5, "temperature": 1, "seed": 3}
    made = await real.openai.completions.create(n=4, logprobs=0, **asked)
    means = {choice.text: math.fsum(choice.logprobs.token_logprobs) / 5 for choice in made.choices}
    best = await real.openai.completions.create(best_of=4, n=2, **asked)
    assert [choice.text for choice in best.choices] == sorted(means, key=lambda text: -means[text])[:2]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.choices[0].logprobs is None and best.usage.completion_tokens == 20


async def test_texts_and_messages_are_tokenized(real: Any, model: str) -> None:
    found = (await real.http.post("/tokenize", json={"model": model, "prompt": TEXT, "return_token_strs": True})).json()
    assert (found["count"], found["tokens"]) == (len(IDS), IDS)
    assert found["token_strs"][:2] == ["n", "a"] and found["token_strs"][-2] == "<s>"
    assert found["max_model_len"] > 0
    back = await real.http.post("/detokenize", json={"model": model, "tokens": IDS})
    assert back.json() == {"prompt": TEXT}
    turns = [HELLO]
    asked = (await real.http.post("/tokenize", json={"messages": turns})).json()
    answer = await real.openai.chat.completions.create(model=model, messages=turns, max_tokens=1)
    assert asked["count"] == answer.usage.prompt_tokens and asked["token_strs"] is None
    left = (await real.http.post("/tokenize", json={"messages": turns, "add_generation_prompt": False})).json()
    assert left["count"] == asked["count"] - len("[assistant]")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("/tokenize", {"prompt": "a", "max_tokens": 1}, "max_tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**6]}, "tokens[0]"),
    ],
)
async def test_tokens_that_are_refused(real: Any, path: str, body: Any, param: str) -> None:
    answer = await real.http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_what_is_not_served_says_why(gateway: Any) -> None:
    assert (await gateway.http.get("/version")).json() == {"version": outrider.__version__}
    with pytest.raises(openai.NotFoundError, match="there are no embeddings"):
        await gateway.openai.embeddings.create(model="m", input="a")
    picture = [{"type": "image_url", "image_url": {"url": "http://a.example/b.png"}}]
    with pytest.raises(openai.BadRequestError, match="reads no images"):
        await gateway.openai.chat.completions.create(model="m", messages=[{"role": "user", "content": picture}])
