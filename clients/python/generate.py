"""Stream an answer. Run a target first: `outrider up`."""

import asyncio
import sys

from outrider_client import Client, SamplingParams


async def main() -> None:
    async with Client.connect("127.0.0.1:50051") as client:
        messages = [("user", "What is a bridge?")]
        async for chunk in client.generate(messages=messages, sampling=SamplingParams(max_tokens=64)):
            sys.stdout.write(chunk.text)


asyncio.run(main())
