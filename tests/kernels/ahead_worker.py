"""Collects what launches would compile for an H100, which takes no GPU, compiles some of it by processes, and writes
what came of it as JSON to standard output."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import threading
from types import SimpleNamespace
from typing import Any

import torch
from random_steps import LAST_POSITION, random_step
from transformers import LlamaConfig, LlamaForCausalLM
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import tree_kernels
from benchmarks.shared.loaded_models import runner_for
from target_service.model.cuda_graphs.capturing import ordered_sizes
from target_service.model.cuda_graphs.runner import CapturedRunner, CaptureOptions
from tree_kernels.ahead import CHILD, AheadCompiler
from tree_kernels.ahead.collecting import collecting
from tree_kernels.linear.cublas_backend import CublasLinears
from tree_kernels.linear.triton_backend import TritonLinears
from tree_kernels.linear.vector_backend import VectorLinears
from tree_kernels.node_table.triton_feeding import advance_one_token, fill
from tree_models.fused import preparing
from tree_models.fused.preparing import LayerOptions

CPU = torch.device("cpu")


class Hopper:
    """A driver without a device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def launches() -> list[Any]:
    step = random_step([1, 0, 1, 1], 4, torch.Generator().manual_seed(0))
    pending = torch.arange(64, dtype=torch.int32)
    return [
        lambda: fill(torch.full((5,), -1, dtype=torch.int32), pending).tolist(),
        lambda: fill(torch.full((16,), -1, dtype=torch.int32), pending).tolist(),
        lambda: advance_one_token(step, 4, LAST_POSITION),
    ]


def compiled_ahead() -> dict[str, Any]:
    """Kernels that are compiled ahead are in the cache when they are launched."""
    results: list[Any] = []
    entries: list[str] = []
    with torch.inference_mode(), collecting(entries.append):
        results += [launch() for _ in range(2) for launch in launches()]
    compiler = AheadCompiler((sys.executable, "-P", "-m", CHILD), 1)
    assert compiler._compilers is not None
    # What cannot be compiled costs the others nothing.
    for entry in ("no JSON", json.dumps({"module": "tree_kernels.nothing", "name": "k", "specialization": {}})):
        compiler._compilers.submit(entry)
    compiler._compilers.wait(300.0)
    failed = list(compiler._compilers.failures)
    counted = compiler.compile("launches", [*launches(), lambda: 1 // 0])
    compiler.close()
    found: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
    usual = JITFunction.run

    def run(self: Any, *arguments: Any, **named: Any) -> Any:
        """As it would be launched, but for the launch."""
        return usual(self, *arguments, **named | {"warmup": True})

    JITFunction.run = run
    for launch in launches():
        launch()
    JITFunction.run = usual
    knobs.compilation.listener = None
    return {"collected": len(entries), "compiled": counted, "found": found, "results": results[:2], "failed": failed}


def other_threads() -> list[bool]:
    """Whether launches of another thread were left as they are, while this one collects."""
    usual, warmed = JITFunction.run, list[bool]()
    JITFunction.run = lambda *_, **named: warmed.append(named["warmup"])
    with collecting(lambda _: None):
        other = threading.Thread(target=launches()[2])
        other.start()
        other.join()
        launches()[2]()
    JITFunction.run = usual
    return warmed


def without_processes() -> list[int]:
    """Kernels collected where the process that compiles has ended, and where there is none."""
    gone = AheadCompiler((sys.executable, "-c", "import sys; sys.stdin.readline()"), 1)
    counted = gone.compile("launches", launches())
    gone.close()
    return [counted, AheadCompiler((), 0).compile("no", launches())]


def kept() -> list[tuple[bool, bool]]:
    """Whether starts find that all was compiled, behind one that failed in a part and one that did not."""
    found: list[tuple[bool, bool]] = []
    command = (sys.executable, "-P", "-m", CHILD)
    for launched, missing in (("these", [lambda: 1 // 0]), ("these", []), ("these", []), ("others", [])):
        compiler = AheadCompiler(command, 1, launched)
        compiler.compile("launches", [*launches(), *missing])
        found.append((compiler.is_kept, compiler.compiles_ahead))
        compiler.close(whole=True)
    return found


def steps() -> dict[str, Any]:
    """What captured steps of a tiny model would compile, by size in the order of capture."""
    cuda: Any = torch.cuda
    cuda.graph_pool_handle, cuda.Stream = lambda: None, lambda _device: None
    cuda.get_device_properties = lambda _device: SimpleNamespace(multi_processor_count=132)
    module: Any = preparing
    module.row_linears = lambda device, invariant=False: TritonLinears(device, invariant=invariant)
    module.single_row_linears, module.many_row_linears = VectorLinears, CublasLinears
    module.computes_the_same = lambda *_: True
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=128, max_position_embeddings=512,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    runner = runner_for(model, None, attention="triton", num_pages=64, page_size=16)
    captured = CapturedRunner(runner, CaptureOptions(128, 16, LayerOptions(compiled=False)))
    sizes, names = [], list[list[str]]()
    entries: list[str] = []
    with torch.inference_mode(), collecting(entries.append):
        for bucket in ordered_sizes(captured):
            before = len(entries)
            captured.rehearse(bucket)
            sizes.append([bucket.rows, bucket.sequences])
            names.append([json.loads(entry)["name"] for entry in entries[before:]])
        rehearsed = len(entries)
        for bucket in captured.buckets[:1] + captured.buckets[-1:]:
            captured._run(captured._rehearsed(bucket))
    keys = [key for key, _ in captured.cache.pools]
    written = any(bool(tensor.any()) for tensors in keys for tensor in tensors)
    return {"sizes": sizes, "names": names, "written": written, "left": entries[rehearsed:]}


def ambiguous() -> list[str]:
    """Kernels that read constants of one name and several values, of several modules: Triton 3.6 puts these into its
    key by where the modules lie in memory, so that a later start would not find them."""
    found = []
    for module in pkgutil.walk_packages(tree_kernels.__path__, "tree_kernels."):
        if "triton" not in module.name:
            continue
        for kernel in vars(importlib.import_module(module.name)).values():
            if isinstance(kernel, JITFunction):
                kernel.cache_key  # noqa: B018, which collects what it reads
                read = {(name, str(value)) for (name, _), (value, _) in kernel.used_global_vals.items()}
                if len(read) > len({name for name, _ in read}):
                    found.append(f"{module.name}: {kernel.__name__}")
    return found


def main() -> None:
    driver.set_active(Hopper())
    # First, while no kernel is in memory.
    without = without_processes()
    json.dump(
        {
            "without": without,
            "ahead": compiled_ahead(),
            "kept": kept(),
            "warmed": other_threads(),
            "steps": steps(),
            "ambiguous": ambiguous(),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
