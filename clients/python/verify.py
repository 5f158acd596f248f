"""Draft in the client: guess that the text repeats itself, and have the target verify the guess."""

import asyncio
import sys

from outrider_client import Client, SamplingParams, TokenTree


def repeat(token_ids: list[int], most: int = 8) -> TokenTree:
    """A chain of what followed the last token where it stood before; the root alone where it did not."""
    root, before = token_ids[-1], token_ids[:-1]
    start = len(before) - before[::-1].index(root) if root in before else len(before)
    guess = before[start : start + most]
    return TokenTree((root, *guess), (0, *range(len(guess))), (1.0,) * (1 + len(guess)))


async def main() -> None:
    async with Client.connect("127.0.0.1:50051") as client, client.verify() as session:
        prompt = [100, 101, 102, 103, 104, 105, 100, 101, 102, 103, 104, 105, 100]
        sequence = await session.open(prompt, sampling=SamplingParams(max_tokens=48))
        while sequence.finish_reason is None:
            verdict = await sequence.verify(repeat(sequence.token_ids))
            sys.stdout.write(f"step {verdict.step}: {len(verdict.accepted_rows)} guesses kept\n")


asyncio.run(main())
