"""Chat without an event loop: each question is sent with the conversation so far. Run a target first: `outrider up`."""

import sys

from outrider_client import SamplingParams, SyncClient

QUESTIONS = ("What is a bridge?", "Which is the longest?")

with SyncClient.connect("127.0.0.1:50051") as client:
    conversation: list[dict[str, str]] = []
    for question in QUESTIONS:
        conversation.append({"role": "user", "content": question})
        sys.stdout.write(f"> {question}\n")
        with client.generate(messages=conversation, sampling=SamplingParams(max_tokens=64)) as generation:
            for chunk in generation:
                sys.stdout.write(chunk.text)
            conversation.append({"role": "assistant", "content": generation.result().text})
        sys.stdout.write("\n")
