"""Sample an answer with a seed, with drafts and without: the tokens are the same. Run a target first: `outrider up`."""

import sys

from outrider_client import SamplingParams, Speculation, SyncClient

SAMPLING = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=64)

with SyncClient.connect("127.0.0.1:50051") as client:
    drafted, plain = (
        client.generate(text="Once upon a time", sampling=SAMPLING, speculation=Speculation(enabled=enabled)).result()
        for enabled in (True, False)
    )
sys.stdout.write(f"{drafted.text}\nthe same without drafts: {drafted.token_ids == plain.token_ids}\n")
