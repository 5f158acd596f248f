"""The examples of kernels/README.md, run as they stand, but on a processor."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from tree_kernels import attention, latent_attention, paging, verification

PAGE = (Path(__file__).parents[2] / "kernels/README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ROWS, PAGES, PAGE_SIZE, HEADS, WIDTH, VOCABULARY = 3, 4, 16, 2, 8, 50
# A tree of three rows, the root's two children, behind a text of five tokens.
PARENTS = (0, 0, 0)
BATCH = attention.AttentionBatch((0, ROWS), (5,), ((0,),), PAGE_SIZE, (PARENTS,))
SLOTS = torch.arange(5, 5 + ROWS)


def run(example: str, *modules: Any, **given: Any) -> dict[str, Any]:
    """What the example's names stand for at its end."""
    names = {name: value for module in modules for name, value in vars(module).items()} | {"torch": torch} | given
    exec(example.replace('"triton", device="cuda"', '"torch", device="cpu"'), names)  # noqa: S102
    return names


def test_a_step() -> None:
    logits = torch.zeros(ROWS, VOCABULARY)
    logits[:, 7] = 1.0
    pools = [torch.zeros(1, PAGES, PAGE_SIZE, HEADS, WIDTH) for _ in range(2)]
    packer = verification.DeviceVerifier("cpu", VOCABULARY, 1, ROWS)
    found = run(
        EXAMPLES[0],
        attention,
        paging,
        verification,
        batch=BATCH,
        key=torch.ones(ROWS, HEADS, WIDTH),
        value=torch.ones(ROWS, HEADS, WIDTH),
        key_cache=pools[0][0],
        value_cache=pools[1][0],
        query=torch.ones(ROWS, HEADS, WIDTH),
        scale=1.0,
        # The second child is what the target says.
        parents=torch.tensor(PARENTS, dtype=torch.int32),
        token_ids=torch.tensor((1, 3, 7), dtype=torch.int32),
        choose=lambda *_: 7,
        caches=[pools[0][0]],
        source_slots=[7],
        target_slots=[6],
        device="cpu",
        vocabulary_size=VOCABULARY,
        max_sequences=1,
        max_rows=ROWS,
        sequences=[verification.RowsToVerify(0, ROWS)],
        logits=logits,
        distributions=torch.from_numpy(packer.pack_distributions({})),
        keys=pools[0],
        values=pools[1],
        slots=SLOTS,
    )
    assert found["output"].shape == (ROWS, HEADS, WIDTH)
    assert found["walk"].accepted_rows == (2,)
    verdicts = found["verdicts"]
    assert verdicts.accepted_counts.tolist() == [1] and verdicts.next_tokens.tolist() == [7]


def test_latent_attention() -> None:
    latent, rotary, plain = 12, 4, 6
    projections = latent_attention.HeadProjections(torch.ones(HEADS, plain, latent), torch.ones(HEADS, WIDTH, latent))
    found = run(
        EXAMPLES[1],
        latent_attention,
        batch=BATCH,
        latents=torch.ones(ROWS, latent),
        rotary=torch.ones(ROWS, rotary),
        cache=torch.zeros(PAGES, PAGE_SIZE, latent + rotary),
        slots=SLOTS,
        plain=torch.ones(ROWS, HEADS, plain),
        rotary_part=torch.ones(ROWS, HEADS, rotary),
        projections=projections,
        latent=latent,
        scale=1.0,
    )
    assert found["values"].shape == (ROWS, HEADS, WIDTH)
