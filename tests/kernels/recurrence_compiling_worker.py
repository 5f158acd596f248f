"""Compiles the kernels of recurrent layers for an H100 or H200, which takes no GPU, in the shapes of Qwen3.5-9B and
LFM2-1.2B, and writes what shared memory each needs as JSON to standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from compiling import few, shared_bytes
from triton.compiler import ASTSource

from tree_kernels.recurrence import (
    triton_gating,
    triton_kernels,
    triton_keyed,
    triton_mixing,
    triton_selective,
)

HALF = ("inputs", "ring", "windows", "weight", "bias", "output", "folded", "rows", "queries", "keys", "reading")
HALF += ("values", "scores", "product", "mixed", "gate", "norm")
OTHERS = dict.fromkeys(("gates", "ring_gates", "folded_gates", "states", "reached", "ends", "steps"), "*fp32")
OTHERS |= {"decay": "*fp32", "words": "*i64", "stride": "i32", "epsilon": "fp32"}
OTHERS |= {"sequences": "i32", "chunks": "i32", "skip": "*fp32", "values_stride": "i32", "gate_stride": "i32"}


def kernels() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Name, kernel and constants."""
    plan = {"PAGE": 16, "WINDOW": 64, "FEW": 16, "BLOCK": 64, "BLOCK_B": 64}
    yield "plan", triton_kernels.plan_kernel, plan
    delta = {"WINDOW": 64, "CHANNELS": 8192, "HEADS": 32, "GROUP": 2, "DK": 128, "DV": 128, "QUERY_AT": 0}
    delta |= {"KEY_AT": 2048, "VALUE_AT": 4096, "NORMED": True, "SCALING": 128**-0.5, "BLOCK_K": 128}
    delta |= {"FEW": 16, "PRECISION": "tf32x3", "STAGES": 2, "STATES": 128, "TAPS": 4}
    delta |= {"BLOCK_R": 4, "BLOCK_C": 256, "BLOCK_T": 4, "BLOCK_G": 64, "DEPENDENT": True}
    mixing = {
        "single": triton_mixing.mix_single_kernel,
        "few": triton_mixing.mix_few_kernel,
        "many": triton_mixing.mix_many_kernel,
        "prepare": triton_mixing.prepare_kernel,
    }
    for rule, own in (("sum", {"DELTA": False, "NORMED": False}), ("delta", {"DELTA": True})):
        for name, kernel in mixing.items():
            columns = {"prepare": 128, "few": 64, "single": 16}.get(name, 32)
            sizes = delta | own | {"BLOCK_V": columns, "PARTS": 128 // columns}
            yield f"{name} {rule}", kernel, {each: sizes[each] for each in kernel.arg_names if each in sizes}
    for name, channels, taps, gates in (("delta", 8192, 4, 64), ("short", 2048, 3, 0)):
        for rows, columns in ((2, 256), (16, 128)):
            sizes = {"WINDOW": 64, "CHANNELS": channels, "TAPS": taps, "BLOCK_R": rows, "GATES": gates}
            own = {"SILU": name == "delta", "BIAS": name == "short", "BLOCK_C": columns, "BLOCK_G": max(1, gates)}
            own["DEPENDENT"] = True
            yield f"convolve {name} {rows}", triton_kernels.convolve_kernel, sizes | own
    sizes = {"WINDOW": 64, "CHANNELS": 2048, "TAPS": 3, "BLOCK_R": 16, "BLOCK_C": 256, "BLOCK_T": 2}
    yield "keep", triton_kernels.keep_kernel, sizes
    yield "gates", triton_gating.delta_gates_kernel, {"HEADS": 32, "BLOCK": 32, "DEPENDENT": True}
    sizes = {"HEADS": 32, "WIDTH": 128, "BLOCK_HEADS": 4, "BLOCK": 128, "DEPENDENT": True}
    yield "gated heads", triton_gating.gated_heads_kernel, sizes
    limits = {"LEAST": 0.0, "MOST": float("inf"), "HEADS": 128, "BLOCK": 128}
    yield "space gates", triton_gating.space_gates_kernel, limits
    # Of Jamba.
    sizes = {"WINDOW": 64, "CHANNELS": 8192, "WIDTH": 16, "GROUPS": 1, "BLOCK_C": 32, "BLOCK_N": 16}
    yield "scan", triton_selective.scan_kernel, sizes
    yield "scan later", triton_selective.scan_later_kernel, sizes
    # Of RecurrentGemma.
    sizes |= {"CHANNELS": 2560, "WIDTH": 1, "GROUPS": 2560, "BLOCK_N": 2}
    yield "scan of channels", triton_selective.scan_kernel, sizes
    yield "scan of channels later", triton_selective.scan_later_kernel, sizes
    # Of Kimi Linear.
    sizes = {"WINDOW": 64, "CHANNELS": 12288, "HEADS": 32, "DK": 128, "DV": 128, "QUERY_AT": 0, "KEY_AT": 4096}
    sizes |= {"VALUE_AT": 8192, "NORMED": True, "SCALING": 128**-0.5, "BLOCK_K": 128, "PRECISION": "tf32x3"}
    for prompts in (False, True):
        own = {"BLOCK_V": 32, "STAGES": 2, "PROMPTS": prompts}
        yield f"mix keyed {prompts}", triton_keyed.mix_keyed_kernel, sizes | own
    yield "prepare keyed", triton_keyed.prepare_keyed_kernel, sizes | {"BLOCK_V": 128}
    yield "keep gates", triton_selective.keep_gates_kernel, {"WINDOW": 64, "GATES": 8208, "BLOCK": 1024}
    for norms, group in ((True, 8192), (False, 1024)):
        sizes = {"HEAD": 64, "GROUP": group, "GROUPS": 8192 // group, "NORMS": norms, "BLOCK": group}
        yield f"space output {norms}", triton_gating.space_output_kernel, sizes


def compiled(name: str, kernel: Any, constants: dict[str, Any]) -> int:
    """Bytes of shared memory of one program."""
    types = dict.fromkeys(HALF, "*bf16") | OTHERS
    names = kernel.arg_names
    signature = {each: "constexpr" if each in constants else types.get(each, "*i32") for each in names}
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, each in enumerate(names) if signature[each].startswith("*")
    }
    source = ASTSource(kernel, signature, {(names.index(each),): value for each, value in constants.items()}, aligned)
    return shared_bytes(source, options_of(name))


def options_of(name: str) -> dict[str, int]:
    if name.startswith("convolve"):
        return {"num_warps": 8 if name.endswith("16") else 2}
    warps = {"prepare": 8, "plan": 2, "single": 1}
    return {"num_warps": warps.get(name.partition(" ")[0], 4)}


def main() -> None:
    chosen = few((*one, options_of(one[0])) for one in kernels())
    json.dump({name: compiled(name, kernel, constants) for name, kernel, constants, _ in chosen}, sys.stdout)


if __name__ == "__main__":
    main()
