"""Compiles kernels for an H100 or H200, which takes no GPU, as they would be launched."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from examples import is_full
from pairs import covering
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptx_version_from_options
from triton.compiler import ASTSource, compile, make_backend

TARGET = GPUTarget("cuda", 90, 32)
_TYPES = {torch.int32: "*i32", torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16"}
# Kernels that this process has compiled to machine code, each with its kind.
_compiled = set[tuple[Any, str]]()
# Of kernels whose memory this process has laid out: the sizes that it depends on.
_laid_out = set[frozenset[tuple[Any, ...]]]()
# Constants that choose code, beside those that are named BLOCK...
_CHOOSING = ("AHEAD", "MOST", "PAGE_SIZE")


def shared_bytes(
    source: ASTSource,
    options: dict[str, Any],
    *,
    kind: str = "",
    by_flags: bool = False,
    check: Callable[[str], None] | None = None,
) -> int:
    """Bytes of shared memory of one program. The first variant of a kernel and `kind` is compiled to machine code, and
    in `make test-full` all are: `check` gets its PTX. The others are compiled until their memory is laid out, behind
    which little depends on sizes and most of the time goes; and where only flags differ, until their types are checked:
    0 bytes. `by_flags` where flags take memory too."""
    sizes = _sizes_of(source, options)
    seen, first = sizes in _laid_out and not by_flags, (source.fn, kind) not in _compiled
    _laid_out.add(sizes)
    if not first and not is_full():
        return laid_out_bytes(source, options, typed_alone=seen)
    found = compile(source, target=TARGET, options=options)
    _compiled.add((source.fn, kind))
    if check is not None:
        check(found.asm["ptx"])
    return int(found.metadata.shared)


def _sizes_of(source: ASTSource, options: dict[str, Any]) -> frozenset[tuple[Any, ...]]:
    constants = ((source.fn.arg_names[place], value) for (place, *_), value in source.constants.items())
    sizes = {(source.fn, *one) for one in (*constants, *options.items()) if type(one[1]) is int}
    return frozenset(one for one in sizes if one[1].startswith(("BLOCK", "num_")) or one[1] in _CHOOSING)


def laid_out_bytes(source: ASTSource, options: dict[str, Any], *, typed_alone: bool = False) -> int:
    """The same by the stages of `triton.compiler.compile` before LLVM, and that one's passes until memory is laid
    out (Triton 3.9, `CUDABackend.make_llir`)."""
    backend = make_backend(TARGET)
    parsed = backend.parse_options({**options, **source.parse_options()})
    context, stages, metadata = ir.context(), dict[str, Any](), dict[str, Any](vars(parsed))
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, parsed, source.language)
    module = source.make_ir(
        TARGET, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context
    )
    module = stages["ttir"](module, metadata)
    if typed_alone:
        return 0
    module = stages["ttgir"](module, metadata)
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager, False)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    version = get_ptx_version_from_options(parsed, TARGET.arch)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, TARGET.arch, version)
    manager.run(module, "allocate_shared_memory")
    return int(module.get_int_attr("ttg.shared"))


class Compiling:
    """Stands where a kernel does, and compiles it for the arguments that it would be launched with. In `make test`
    only where a constant has a value that the kernel was not compiled with before, as of `few`."""

    def __init__(self, kernel: Any, needed: dict[str, int], *, skip: bool = False) -> None:
        """`needed` gets bytes of shared memory of one program; with `skip` nothing is compiled."""
        self.kernel = kernel
        self.needed = needed
        self.skip = skip
        self._seen = set[tuple[Any, ...]]()

    def __getitem__(self, grid: tuple[int, ...]) -> Compiling:
        return self

    def __call__(self, *arguments: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any) -> None:
        if self.skip:
            return
        names = self.kernel.arg_names
        signature = dict.fromkeys(names, "constexpr")
        for name, argument in zip(names, arguments, strict=False):
            if argument is None:
                constants[name] = None
            else:
                signature[name] = _TYPES[argument.dtype] if isinstance(argument, torch.Tensor) else "i32"
        assert constants.keys() == {name for name, type_name in signature.items() if type_name == "constexpr"}
        source = ASTSource(self.kernel, signature, {(names.index(name),): value for name, value in constants.items()})
        name = f"{self.kernel.__name__}, {num_warps} warps, {sorted(constants.items(), key=str)}"
        # Launched again as it was before, it is compiled.
        if name in self.needed:
            return
        options = {"num_warps": num_warps, "num_stages": num_stages}
        parts = _parts(self.kernel.__name__, constants, options)
        self.needed[name] = shared_bytes(source, options) if is_full() or not parts <= self._seen else 0
        self._seen |= parts


def few(found: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Of kernels to compile, each (name, kernel, .., constants, options), those that together have every kernel with
    each value of a constant that is no length; all of them in `make test-full`."""
    everything = list(found)
    if is_full():
        return everything
    kept = covering([_parts(kernel.__name__, constants, options) for _, kernel, *_, constants, options in everything])
    return [everything[place] for place in sorted(kept)]


def _parts(kernel: str, constants: dict[str, Any], options: Any) -> set[tuple[Any, ...]]:
    stages = options.get("num_stages") if isinstance(options, dict) else None
    chosen = {
        (kernel, name, value)
        for name, value in constants.items()
        if isinstance(value, bool | str | None) or name.startswith("BLOCK") or name in _CHOOSING
    }
    return chosen | {(kernel,), (kernel, "num_stages", stages)}
