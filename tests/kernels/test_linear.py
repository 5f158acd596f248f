"""The linear kernels against their definition: interpreted on a CPU here, compiled on a GPU under `make test-gpu`."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_worker import INTERPRETED, compiled, work
from torch import Tensor
from torch.nn import functional
from transformers.activations import XIELUActivation
from transformers.models.glm4 import modeling_glm4 as glm

from tree_kernels.hopper import runs_on
from tree_kernels.linear import (
    Activation,
    ActivationKind,
    HeadForm,
    HeadInputs,
    HeadRows,
    Int8Weight,
    Norm,
    RowLinears,
    ScaledRows,
    SumForm,
    many_row_linears,
    row_linears,
)

pytest.importorskip("triton")
from tree_kernels.hopper.ring_tiling import RingKind, choose_ring_tiling
from tree_kernels.linear import ring_backend
from tree_kernels.linear.cublas_backend import CublasLinears
from tree_kernels.linear.triton_backend import TritonLinears
from tree_kernels.linear.triton_tiling import (
    choose_linear_tiling,
    choose_mapped_tiling,
    heads_take_a_launch,
    whole_head_tiling,
)

WORKER = "linear_worker.py"
CPU = torch.device("cpu")
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (960, 576), (576, 1536), (64, 4096)]
LONG_SHAPES = [(5120, 8192), (8192, 4096), (28672, 8192), (8192, 14336), (8192, 2880)]


def test_no_layer_is_left_to_pytorch_on_a_gpu() -> None:
    """A method of the definition that the kernels' class does not override would run, and be slow."""
    # These two call `_activated`, and nothing else.
    defined = {name for name in vars(RowLinears) if not name.startswith("_")} - {"gated_linear", "activated_linear"}
    defined.add("_activated")
    assert len(defined) > 1 and defined <= vars(TritonLinears).keys()


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    return work(WORKER, **INTERPRETED)


def check(found: dict[str, Any], bf16: float = 1e-2) -> None:
    """fp32 agrees to rounding, half precision to its own."""
    halves = ("half precision", "half precision, int8", "half precision: olmo2")
    tolerance = dict.fromkeys((*halves, "float16 cublas False", "float16 cublas True"), 2e-3)
    wrong = {
        f"{name}: {output}": error
        for name, errors in found["errors"].items()
        for output, error in errors.items()
        # Written so that NaN fails.
        if not error <= tolerance.get(name, bf16 if name.startswith("bf16") else 2e-6)
    }
    assert not wrong
    assert found["unslotted"]
    assert found["conditional"] and all(found["conditional"].values())
    assert len(found["empty"]) == 3
    assert all(shape[0] == 0 for shapes in found["empty"].values() for shape in shapes.values())


def test_every_case_equals_the_definition(interpreted: dict[str, Any]) -> None:
    assert len(interpreted["errors"]) > 10
    # The interpreter cuts off what bf16 has no room for, where a GPU rounds.
    check(interpreted, bf16=2e-2)


def test_no_row_depends_on_how_many_there_are(interpreted: dict[str, Any]) -> None:
    assert interpreted["changed"] == {"own tiling": []}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_case_holds_on_a_gpu() -> None:
    found = work(WORKER, TRITON_INTERPRET="0")
    check(found)
    assert len(found["changed"]) > 4
    assert not any(found["changed"].values())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_invariant_tiling_knows_no_rows(shape: tuple[int, int]) -> None:
    chosen = {choose_linear_tiling(rows, *shape, invariant=True) for rows in (1, 2, 16, 64, 300)}
    assert len(chosen) == 1
    # It is the one that full tiles have, so that wide steps are as fast as without.
    assert chosen == {choose_linear_tiling(64, *shape)}


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 32, 64, 65])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tile_holds_the_rows_and_little_more(rows: int, shape: tuple[int, int]) -> None:
    tiling = choose_linear_tiling(rows, *shape)
    assert min(rows, 64) <= tiling.block_rows <= max(8, 2 * rows - 1)
    # Shared memory of one processor.
    assert (tiling.block_rows + tiling.block_outputs) * tiling.block_inner * 2 * tiling.stages <= 227_000
    narrow = choose_linear_tiling(rows, *shape, int8=True)
    assert narrow.block_rows == tiling.block_rows
    assert (2 * narrow.block_rows + narrow.block_outputs) * narrow.block_inner * narrow.stages <= 227_000


@pytest.mark.parametrize("gated", [False, True], ids=["alone", "gate and up"])
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129])
@pytest.mark.parametrize("shape", [*SHAPES, *LONG_SHAPES], ids=str)
def test_tensor_maps_are_for_blocks_that_fill_the_matrix_units(rows: int, shape: tuple[int, int], gated: bool) -> None:
    tiling = choose_mapped_tiling(rows, *shape, gated=gated)
    if tiling is None:
        return
    assert 8 < rows <= (128 if gated else 64) and tiling.mapped
    assert tiling.block_rows // 2 < rows <= tiling.block_rows
    assert not gated or tiling.splits == 1
    assert shape[1] % (tiling.splits * tiling.block_inner) == 0
    assert tiling.block_outputs // (2 if gated else 1) >= 64
    assert (tiling.block_rows + tiling.block_outputs) * tiling.block_inner * 2 * tiling.stages <= 227_000


@pytest.mark.parametrize("rows", [17, 32, 33, 64])
def test_the_halves_of_a_70b_layer_keep_the_memory_busy(rows: int) -> None:
    """Twice as many tiles as would be one head, or 128 outputs, each."""
    heads = choose_mapped_tiling(rows, 5120, 8192, head_width=128)
    assert heads is not None and heads.block_outputs == 128 and heads.splits == 2
    for inner in (4096, 14336):
        sums = choose_mapped_tiling(rows, 8192, inner)
        assert sums is not None and 8192 // sums.block_outputs * sums.splits == 128


@pytest.mark.parametrize("rows", [17, 32, 33, 64])
def test_the_states_of_a_gated_delta_net_are_read_in_wide_tiles(rows: int) -> None:
    states = choose_mapped_tiling(rows, 12288, 4096)
    assert states is not None and (states.block_outputs, states.block_inner, states.splits) == (128, 128, 1)
    # Other products of so many rows stay.
    assert states != choose_mapped_tiling(rows, 8192, 4096)
    assert (choose_mapped_tiling(rows, 128256, 4096) is None) == (rows <= 32)


def test_the_definition_is_that_of_a_decoder_layer() -> None:
    """In the words of torch: a norm, projections, rotary embedding of halves, SiLU."""
    torch.manual_seed(0)
    linears = RowLinears()
    hidden, norm = torch.randn(5, 24), Norm(torch.rand(24), 1e-5)
    normed = functional.rms_norm(hidden, (24,), norm.weight, norm.epsilon)
    torch.testing.assert_close(linears.norm_rows(hidden, norm), normed)
    weight, bias = torch.randn(4 * 8, 24), torch.randn(4 * 8)
    angles = torch.randn(5, 4).repeat(1, 2)
    keys, values = torch.zeros(7, 1, 1, 8), torch.zeros(7, 1, 1, 8)
    slots = torch.tensor([6, 2, 0, 1, 4])
    scaled = linears.scale_rows(hidden, norm)
    query = linears.rotary_linear(scaled, weight, bias, HeadRows(angles.cos(), angles.sin(), slots, keys, values))
    heads = functional.linear(normed, weight, bias).view(5, 4, 8)
    turned = torch.view_as_complex(torch.stack(heads.chunk(2, dim=2), dim=3)) * torch.polar(
        torch.ones(5, 1, 4), angles[:, None, :4]
    )
    expected = torch.cat((turned.real, turned.imag), dim=2)
    torch.testing.assert_close(query, expected[:, :2])
    torch.testing.assert_close(keys[slots, 0], expected[:, 2:3])
    torch.testing.assert_close(values[slots, 0], heads[:, 3:])
    gate, up = functional.linear(normed, weight).chunk(2, dim=1)
    torch.testing.assert_close(linears.gated_linear(scaled, weight), functional.silu(gate) * up)


def test_the_forms_are_those_of_the_families() -> None:
    """In the words of transformers: GLM-4's rotary embedding, Qwen3's and OLMo 2's norms, LayerNorm, xIELU."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 24), torch.randn(6 * 8, 24)
    layer_norm = Norm(torch.rand(24), 1e-5, torch.randn(24), centered=True)
    expected = functional.layer_norm(hidden, (24,), layer_norm.weight, layer_norm.bias, 1e-5)
    rows = RowLinears().scale_rows(hidden, layer_norm)
    torch.testing.assert_close(rows.rows, expected)
    angles = torch.randn(5, 2).repeat(1, 2)
    for own in (8, 32):
        norms = Norm(torch.rand(own), 1e-6), Norm(torch.rand(8), 1e-6)
        keys, values = torch.zeros(2, 5, 1, 1, 8)
        heads = HeadRows(angles.cos(), angles.sin(), torch.arange(5), keys, values)
        form = HeadForm(*norms, interleaved=True)
        query = RowLinears().rotary_linear(rows, weight, None, heads, form=form)
        product = functional.linear(expected, weight)
        plain = product[:, :32].view(5, -1, own)
        normed = functional.rms_norm(plain, (own,), norms[0].weight, 1e-6).view(1, 5, 4, 8).transpose(1, 2)
        key = functional.rms_norm(product[:, 32:40], (8,), norms[1].weight, 1e-6).view(1, 1, 5, 8)
        turned, turned_key = glm.apply_rotary_pos_emb(normed, key, angles.cos()[None], angles.sin()[None])
        torch.testing.assert_close(query, turned[0].transpose(0, 1))
        torch.testing.assert_close(keys[:, 0], turned_key[0].transpose(0, 1))
    xielu = XIELUActivation(dtype=torch.float32)
    parameters = torch.stack(
        (
            functional.softplus(xielu.alpha_p[0]),
            xielu.beta + functional.softplus(xielu.alpha_n[0]),
            xielu.beta,
            xielu.eps,
        )
    )
    found = RowLinears().activated_linear(rows, weight, None, Activation(ActivationKind.XIELU, parameters))
    torch.testing.assert_close(found, xielu(functional.linear(expected, weight)))
    sandwich = SumForm(layer_norm, 0.5)
    found, _ = RowLinears().add_linear(hidden, weight[:24], residual=hidden, form=sandwich)
    product = functional.layer_norm(functional.linear(hidden, weight[:24]), (24,), layer_norm.weight, layer_norm.bias)
    torch.testing.assert_close(found, hidden + 0.5 * product)


def test_forms_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="norms of queries and keys"):
        HeadForm(query_norm=Norm(torch.ones(8), 1e-6))
    with pytest.raises(ValueError, match="parameters for xIELU"):
        Activation(ActivationKind.XIELU)
    norm, rows = Norm(torch.ones(16), 1e-6, centered=True), torch.zeros(2, 16)
    heads = HeadRows(rows, rows, torch.zeros(2), torch.zeros(3, 1, 1, 16), torch.zeros(3, 1, 1, 16))
    with pytest.raises(ValueError, match="RMSNorms of heads"):
        TritonLinears(CPU).rotary_linear(
            ScaledRows(rows, None, 1e-6), torch.zeros(48, 16), None, heads, form=HeadForm(norm, norm)
        )


@pytest.mark.parametrize("rows", [1, 16, 32, 64])
@pytest.mark.parametrize("shape", [(6144, 4096), (5120, 2048), (6144, 2560), (4096, 1024)], ids=str)
def test_tiles_that_are_heads_keep_the_memory_busy(rows: int, shape: tuple[int, int]) -> None:
    tiling = whole_head_tiling(choose_linear_tiling(rows, *shape), 128, *shape)
    assert tiling.block_outputs == 128
    assert shape[1] % (tiling.splits * tiling.block_inner) == 0
    assert 64 <= shape[0] // 128 * tiling.splits <= 512
    assert (tiling.block_rows + 128) * tiling.block_inner * 2 * tiling.stages <= 227_000
    assert tiling.ahead & (tiling.ahead - 1) == 0


def test_norms_of_wide_heads_take_a_launch_behind_many_rows() -> None:
    taken = [heads_take_a_launch(rows, 256, invariant=False) for rows in (8, 9, 64)]
    assert taken == [False, True, True]
    assert all(heads_take_a_launch(rows, 256, invariant=True) for rows in (1, 8, 64))
    assert not heads_take_a_launch(64, 128, invariant=True)


@pytest.mark.parametrize("linears", [TritonLinears(CPU), CublasLinears(CPU)], ids=["triton", "cublas"])
def test_rows_that_the_kernels_cannot_read_are_refused(linears: TritonLinears) -> None:
    with pytest.raises(ValueError, match="one dtype"):
        linears.add_linear(torch.zeros(2, 16), torch.zeros(16, 16, dtype=torch.float16))
    with pytest.raises(ValueError, match="contiguous"):
        linears.add_linear(torch.zeros(2, 16), torch.zeros(16, 32)[:, ::2])
    with pytest.raises(ValueError, match=r"expected rows \[R, 32\]"):
        linears.add_linear(torch.zeros(2, 16), torch.zeros(16, 32))
    with pytest.raises(ValueError, match="last dimension is contiguous"):
        linears.norm_rows(torch.zeros(16, 2).T, Norm(torch.ones(16), 1e-5))
    with pytest.raises(ValueError, match="last dimension is contiguous"):
        linears.norm_rows(torch.zeros(2, 16), Norm(torch.ones(16), 1e-5), torch.zeros(16, 2).T)
    with pytest.raises(ValueError, match="one shape whose last"):
        linears.copy_rows(torch.zeros(2, 16), torch.zeros(2, 8))


def apart(*shape: int) -> Tensor:
    """A tensor with unread numbers between its own."""
    return torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2]


@pytest.mark.parametrize("linears", [TritonLinears(CPU), CublasLinears(CPU)], ids=["triton", "cublas"])
def test_inputs_with_strides_are_refused_by_name(linears: TritonLinears) -> None:
    rows, weight, norm = torch.zeros(2, 16), torch.zeros(16, 16), Norm(torch.ones(16), 1e-5)
    for name, given in (
        ("bias", {"bias": apart(16)}),
        ("residual", {"residual": apart(2, 16)}),
        ("norm", {"norm": Norm(apart(16), 1e-5)}),
    ):
        with pytest.raises(ValueError, match=f"expected {name} to be contiguous"):
            linears.add_linear(rows, weight, **given)
    with pytest.raises(ValueError, match="expected norm to be contiguous"):
        linears.norm_rows(rows, Norm(apart(16), 1e-5))
    scaled = ScaledRows(rows, torch.zeros(2, 1) if type(linears) is TritonLinears else None, 1e-5)
    whole = HeadRows(rows, rows, torch.zeros(2, dtype=torch.int64), torch.zeros(3, 1, 1, 16), torch.zeros(3, 1, 1, 16))
    projection = torch.zeros(48, 16)
    for name in ("cosines", "sines", "slots", "key_cache", "value_cache"):
        heads = replace(whole, **{name: apart(*getattr(whole, name).shape)})
        with pytest.raises(ValueError, match=f"expected {name} to be contiguous"):
            linears.rotary_linear(scaled, projection, None, heads)
    with pytest.raises(ValueError, match="expected bias to be contiguous"):
        linears.rotary_linear(scaled, projection, apart(48), whole)
    made = HeadInputs(torch.zeros(9, 16), norm, norm, torch.ones(16), 1.0)
    for name, tokens, positions in (("token_ids", apart(2), torch.zeros(2)), ("positions", torch.zeros(2), apart(2))):
        with pytest.raises(ValueError, match=f"expected {name} to be contiguous"):
            linears.head_input(tokens, rows, positions, made)


def test_rows_whose_norm_is_half_done_must_follow_each_other() -> None:
    linears, weight = TritonLinears(CPU), torch.zeros(48, 16)
    heads = HeadRows(*torch.zeros(2, 2, 16), torch.zeros(2), torch.zeros(3, 1, 1, 16), torch.zeros(3, 1, 1, 16))
    for name, rows, squares in (
        ("rows", torch.zeros(2, 32)[:, :16], torch.zeros(2, 1)),
        ("squares", torch.zeros(2, 16), apart(2, 2)),
    ):
        scaled = ScaledRows(rows, squares, 1e-5)
        with pytest.raises(ValueError, match=f"expected {name} to be contiguous"):
            linears.gated_linear(scaled, weight)
        with pytest.raises(ValueError, match=f"expected {name} to be contiguous"):
            linears.rotary_linear(scaled, weight, None, heads)


def test_weights_in_int8_that_the_kernels_cannot_read_are_refused() -> None:
    weight = Int8Weight.of(torch.randn(16, 32))
    with pytest.raises(ValueError, match=r"expected rows \[R, 32\]"):
        TritonLinears(CPU).add_linear(torch.zeros(2, 16), weight)
    with pytest.raises(ValueError, match="or weights in int8"):
        TritonLinears(CPU).add_linear(torch.zeros(2, 32), replace(weight, row_scales=weight.row_scales[:3]))
    with pytest.raises(ValueError, match="expected row_scales to be contiguous"):
        TritonLinears(CPU).add_linear(torch.zeros(2, 32), replace(weight, row_scales=apart(16)))
    with pytest.raises(ValueError, match="even number"):
        Int8Weight.of(torch.randn(16, 31))


def test_a_cpu_gets_the_definition() -> None:
    assert type(row_linears(CPU)) is type(many_row_linears(CPU)) is RowLinears


def test_rows_that_are_normed_by_half_are_refused() -> None:
    """Their products could overflow float16."""
    rows = ScaledRows(torch.zeros(2, 16), torch.ones(2, 1), 1e-5)
    with pytest.raises(ValueError, match="normed whole"):
        CublasLinears(CPU).gated_linear(rows, torch.zeros(32, 16))


def test_a_product_with_nothing_behind_it_is_the_librarys() -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(5, 16), torch.randn(24, 16)
    assert torch.equal(CublasLinears(CPU).add_linear(rows, weight)[0], functional.linear(rows, weight))


@pytest.mark.parametrize("rows", [2, 8, 9, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("kind", RingKind)
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 12288), (24576, 4096), (8192, 8192), (5120, 5120)], ids=str)
def test_rings_fit_a_processor_and_its_neighbours(kind: RingKind, rows: int, shape: tuple[int, int]) -> None:
    tiling = choose_ring_tiling(kind, rows, *shape, processors=132)
    if tiling is None:
        return
    assert rows <= tiling.block_rows < 2 * max(rows, 5)
    programs = shape[0] // (64 * kind.parts) * tiling.splits
    at_once = -(-programs // 132)
    assert programs <= 132 * at_once and at_once <= kind.parts
    ring = (64 * kind.parts + tiling.block_rows) * tiling.block_inner * 2 * tiling.stages
    # Sums are stored from another layout than they are made in, which takes as much memory again as they do.
    assert at_once * (ring + 4 * 64 * tiling.block_rows) < 227 << 10
    blocks = shape[1] / tiling.splits / tiling.block_inner
    assert blocks == int(blocks) >= tiling.stages


def test_rings_are_for_what_they_were_tried_for() -> None:
    def is_ring(kind: RingKind, rows: int, outputs: int, inner: int, processors: int = 132) -> bool:
        return choose_ring_tiling(kind, rows, outputs, inner, processors=processors) is not None

    sums, gated, heads = RingKind
    assert all(is_ring(sums, rows, 4096, inner) for rows in (2, 16, 32, 64) for inner in (4096, 12288, 14336))
    assert [is_ring(gated, rows, 28672, 4096) for rows in (16, 64, 65)] == [True, True, False]
    assert [is_ring(heads, rows, 6144, 4096) for rows in (8, 16, 32, 64)] == [True, True, False, True]
    # Too few programs, more than a turn, other lengths, columns that fill no tile, another device.
    assert not is_ring(sums, 16, 5120, 5120) and not is_ring(gated, 16, 43008, 4096)
    assert not is_ring(gated, 16, 28672, 8192) and not is_ring(sums, 16, 4096, 2048)
    assert not is_ring(sums, 16, 8192, 4096)
    assert not is_ring(sums, 16, 4096 - 8, 4096) and not is_ring(sums, 16, 4096, 4096, processors=78)


def test_rings_are_launched_with_all_that_their_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the device that runs them: which tensors go where, and over which programs."""
    found: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}

    class Noted:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*given: Any, **named: Any) -> None:
                names = self.kernel.arg_names
                own = dict(zip(names, given, strict=False)) | named
                assert len(own) == len(given) + len(named)
                assert own.keys() == {*names, "num_warps", "launch_pdl"}
                found[self.kernel.__name__] = grid, own

            return launch

    for name in ("ring_add_kernel", "ring_activated_kernel", "ring_rotary_kernel"):
        monkeypatch.setattr(ring_backend, name, Noted(getattr(ring_backend, name)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    linears = ring_backend.RingLinears(CPU)

    def half(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)

    norm, rows = Norm(half(4096), 1e-5), half(5, 4096)
    output, scaled = linears.add_linear(rows, half(4096, 4096), None, rows, norm)
    grid, own = found["ring_add_kernel"]
    assert scaled is not None and scaled.squares is not None and scaled.squares.shape == (5, 64)
    assert grid == (1, 64, 2) and own["BLOCK_M"] == 8 and own["ADDS"] and own["SCALES"] and not own["HAS_BIAS"]
    read = own["residual"], own["norm_weight"], own["output"], own["scaled"], own["squares"]
    for one, expected in zip(read, (rows, norm.weight, output, scaled.rows, scaled.squares), strict=True):
        assert one is expected
    assert linears.gated_linear(scaled, half(28672, 4096)).shape == (5, 14336)
    grid, own = found["ring_activated_kernel"]
    assert grid == (1, 224, 1) and (own["SUMS"], own["OUTPUTS"]) == (64, 14336) and own["squares"] is scaled.squares
    heads = HeadRows(half(5, 128), half(5, 128), torch.arange(5), half(5, 1, 8, 128), half(5, 1, 8, 128))
    assert linears.rotary_linear(scaled, half(6144, 4096), None, heads).shape == (5, 32, 128)
    grid, own = found["ring_rotary_kernel"]
    assert grid == (1, 48, 2) and (own["HEADS"], own["KV_HEADS"], own["NORMS"]) == (32, 8, False)
    assert own["key_cache"] is heads.key_cache and own["value_cache"] is heads.value_cache


@pytest.mark.parametrize(
    ("capability", "version", "found"),
    [((9, 0), "3.6.0", True), ((9, 0), "3.9.1", True), ((10, 0), "3.6.0", False), ((9, 0), "3.10.0", False)],
)
def test_hoppers_kernels_run_where_they_were_compiled(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], version: str, found: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr("triton.__version__", version)
    assert runs_on(torch.device("cuda")) is found and not runs_on(CPU)


def test_the_kernels_behind_products_compile_for_a_gpu() -> None:
    """A program has 227 KB of shared memory, and two that share a processor have them together."""
    needed = compiled("linear_compiling_worker.py")
    assert len(needed) > 8 and max(needed.values()) < 227 << 10
