"""On which GPUs `outrider up` puts a target and its draft, where the user names no device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from outrider.heads import head_made_for
from outrider.named_heads import WITH_HEAD, flag_value, head_setting, merged_drafters
from outrider_client.local.models import DEFAULT_MODEL

# Drafters that run a network, and the settings sections of the drafters that they may consist of.
_NEURAL: Mapping[str, tuple[str, ...]] = {
    "assistant": ("assistant",),
    "eagle": ("eagle",),
    "medusa": ("medusa",),
    "merged": ("eagle", "medusa", "model", "mtp"),
    "model": ("model",),
    "mtp": ("mtp",),
}
# That which has nothing to read but in the target's passes, on a CPU too.
_IN_PASSES_ALONE = "assistant"
# Flags of a target whose passes cannot draft, but for the values behind them.
_APART_WITH = (
    ("--attention", ("auto", "triton")), ("--draft-head", ()), ("--lockstep", ()), ("--batch-invariant", ()),
    ("--no-speculation", ()),
)  # fmt: skip


class GpuPlacement(NamedTuple):
    """Flags for target and draft, a line about them, whether both run on one GPU, and whether the target's own passes
    then draft; empty where nothing is placed."""

    target: tuple[str, ...] = ()
    draft: tuple[str, ...] = ()
    summary: str = ""
    shared: bool = False
    in_pass: bool = False


def visible_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """The number of NVIDIA GPUs that CUDA would use here: those that `CUDA_VISIBLE_DEVICES` lists, else all."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    found = len([path for path in devices.glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit()])
    names = [name for name in (listed or "").split(",") if name.strip() not in ("", "-1")]
    return found if listed is None else min(found, len(names))


def place(
    gpus: int,
    drafter: str,
    model: str,
    target_words: Sequence[str],
    draft_words: Sequence[str],
    named: Mapping[tuple[str, str], str] = MappingProxyType({}),
    *,
    apart: bool = False,
) -> GpuPlacement:
    """The target on the first GPU, or the ranks of one on as many as there are; an EAGLE head or one MTP module in its
    passes, unless it has to be `apart` or the target's settings do not allow it, and another neural draft on the next
    GPU, or on the last of the target's where there is no other. `drafter` and `model` are empty for the services' own
    settings; `target_words` and `draft_words` are flags that the user gave.
    Flags of a placement would override the settings that are `named` (see `named_settings`), so these count as the
    user's flags do: where a device is named, nothing is placed, and where a head is, that one is used."""
    drafter = drafter or named.get(("draft", "drafter"), "")
    sections = ("target", *_NEURAL.get(drafter, ()))
    alone = drafter == _IN_PASSES_ALONE and not apart
    given = any(flag_value(words, "--device") is not None for words in (target_words, draft_words))
    if not gpus or given or any((section, "device") in named for section in sections):
        return GpuPlacement(shared=alone, in_pass=alone)
    names = {drafter, *(merged_drafters(draft_words, named) if drafter == "merged" else ())}
    ranks = _ranks(target_words, named)
    target, draft = ["--device", "cuda:0"], list[str]()
    summary = "the target runs on cuda:0" + (f" to cuda:{ranks - 1}" if ranks > 1 else "")
    several = flag_value(draft_words, "--num-modules") or named.get(("mtp", "num_modules"), "")
    # One of them alone runs in the target's passes.
    neural = names & _NEURAL.keys() - {"merged"}
    in_pass = not apart and neural in ({"eagle"}, {"mtp"}) and several in ("", "0", "1")
    in_pass = in_pass and not any(flag_value(target_words, flag) not in (None, *usual) for flag, usual in _APART_WITH)
    in_pass = in_pass and not any(("target", name) in named for name in ("attention", "draft_head", "lockstep"))
    in_pass = in_pass or alone
    shared = drafter in _NEURAL and (in_pass or gpus <= ranks)
    if drafter in _NEURAL:
        device = f"cuda:{0 if in_pass else min(ranks, gpus) - 1 if shared else ranks}"
        # Medusa heads have no passes to capture, and no such flag; several MTP modules cannot be captured.
        draft = ["--device", device] if names & {"medusa", "mtp"} else ["--device", device, "--cuda-graphs"]
        if in_pass:
            summary += ", and the head drafts in its passes"
        else:
            summary += f", the draft on {device}" + (", which it shares with the target" if shared else "")
    if drafter in WITH_HEAD:
        head, flags = _head(names, model or named.get(("target", "model"), "") or DEFAULT_MODEL, draft_words, named)
        draft += flags
        # A captured step keeps the states that a head reads only if it is named.
        told = flag_value(target_words, "--draft-head") is not None or ("target", "draft_head") in named
        if head and not (in_pass or told):
            target += ["--draft-head", head]
    # How one GPU is shared with a rank of several is left to its driver.
    return GpuPlacement(tuple(target), tuple(draft), summary, shared and (in_pass or ranks == 1), in_pass)


def _ranks(words: Sequence[str], named: Mapping[tuple[str, str], str]) -> int:
    """GPUs that the target takes; one for a number that it will refuse."""
    given = flag_value(words, "--tensor-parallel") or named.get(("target", "tensor_parallel"), "")
    return max(1, int(given)) if given.isdecimal() else 1


def _head(
    names: Set[str], model: str, words: Sequence[str], named: Mapping[tuple[str, str], str]
) -> tuple[str, tuple[str, ...]]:
    """The head of these drafters, empty for none, and the draft's flags for one that the user did not name."""
    flag, setting = head_setting(names)
    own = ""
    if "mtp" in names:
        # The model's own, which its checkpoint has.
        own = model
    elif "medusa" not in names and (shipped := head_made_for(model)) is not None:
        # Of Medusa heads none comes with Outrider.
        own = shipped.name
    chosen = flag_value(words, flag) or named.get(setting, "")
    return (chosen, ()) if chosen or not own else (own, (flag, own))
