"""A model's folder is read whole, or refused before it is served, in one line that names what is wrong."""

from __future__ import annotations

import itertools
import json
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from outrider.checkpoints import tensors as tensors_module
from outrider.checkpoints.causal_lm import load_causal_lm, read_configuration
from outrider.checkpoints.folder import INDEX, WEIGHTS, Checkpoint
from outrider.checkpoints.headers import HEADER_BYTES, read_header
from outrider.checkpoints.refusal import CheckpointRefused
from outrider.checkpoints.regular_files import opened

NORM = "model.layers.1.input_layernorm.weight"
MATRIX = "model.layers.0.mlp.up_proj.weight"
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
QWEN2_BIAS = "model.layers.1.self_attn.k_proj.bias"
Tensors = dict[str, Tensor]


def load(folder: Path) -> PreTrainedModel:
    checkpoint = Checkpoint.of_folder(folder)
    return load_causal_lm(checkpoint, read_configuration(folder), torch.float32)


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointRefused) as refused:
        load(folder)
    said = str(refused.value)
    assert "\n" not in said and len(said) < 1000
    return said


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a tiny model, written once; copied by `folder_of`."""
    made: dict[str, Path] = {}

    def write(model_type: str = "llama", **settings: Any) -> Path:
        key = repr((model_type, settings))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("saved")
            make_tiny(model_type, **settings).save_pretrained(made[key])
        return made[key]

    return write


FolderOf = Callable[..., Path]


@pytest.fixture
def folder_of(saved: Callable[..., Path], tmp_path: Path) -> FolderOf:
    numbers = iter(range(1000))

    def copied(model_type: str = "llama", **settings: Any) -> Path:
        folder = tmp_path / f"model-{next(numbers)}"
        folder.mkdir()
        for file in saved(model_type, **settings).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return folder

    return copied


@pytest.fixture
def folder(folder_of: FolderOf) -> Path:
    return folder_of()


def change(folder: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def configure(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def shard(folder: Path) -> tuple[str, str]:
    """Two files and an index, as large models have."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    places = {name: files[i % 2] for i, name in enumerate(names)}
    for file in files:
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return files


class TestWhole:
    @pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral", "gpt2", "gpt_neox", "granitemoe"])
    def test_a_model_is_what_was_saved(self, family: str, folder_of: FolderOf) -> None:
        expected = make_tiny(family).state_dict()
        loaded = load(folder_of(family))
        assert loaded.state_dict().keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
        assert loaded.generation_config is not None and loaded.generation_config.eos_token_id == 2

    def test_files_of_an_index_are_one_model(self, folder: Path) -> None:
        expected = load(folder).state_dict()
        shard(folder)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in load(folder).state_dict().items())

    def test_an_index_needs_no_metadata(self, folder: Path) -> None:
        shard(folder)
        assert "metadata" not in json.loads((folder / INDEX).read_text())
        load(folder)

    def test_what_a_rule_ignores_is_no_part_of_the_model(self, folder: Path) -> None:
        """Buffers that are computed, an MTP module, other files, a pickle beside."""
        more = {
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6),
            "model.mtp_layers.0.input_proj.weight": torch.ones(4, 4),
            "model.layers.2.eh_proj.weight": torch.ones(4, 4),
            "model.layers.2.enorm.weight": torch.ones(4),
        }
        expected = load(folder).state_dict()
        change(folder, lambda tensors: tensors.update(more))
        (folder / "pytorch_model.bin").write_bytes(b"pickled")
        save_file({"a": torch.ones(1)}, folder / "medusa_lm_head.safetensors")
        assert all(torch.equal(tensor, expected[name]) for name, tensor in load(folder).state_dict().items())

    def test_tied_tensors_may_be_there_twice_if_they_are_equal(self, folder_of: FolderOf) -> None:
        folder = folder_of(tie_word_embeddings=True)
        change(folder, lambda tensors: tensors.update({LM_HEAD: tensors[EMBEDDING].clone()}))
        loaded = load(folder)
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
        change(folder, lambda tensors: tensors[LM_HEAD].add_(1))
        assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(folder)

    def test_names_without_the_bodys_are_the_same_tensors(self, folder: Path) -> None:
        expected = load(folder).state_dict()

        def strip(tensors: Tensors) -> None:
            for name in list(tensors):
                tensors[name.removeprefix("model.")] = tensors.pop(name)

        change(folder, strip)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in load(folder).state_dict().items())

    def test_of_two_tied_tensors_one_is_enough(self, folder_of: FolderOf) -> None:
        folder = folder_of(tie_word_embeddings=True)
        expected = load(folder).state_dict()
        change(folder, lambda tensors: tensors.update({LM_HEAD: tensors.pop(EMBEDDING)}))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in load(folder).state_dict().items())


class TestTensors:
    @pytest.mark.parametrize("name", [LM_HEAD, EMBEDDING, NORM, MATRIX, "model.norm.weight"])
    def test_a_missing_one_is_named(self, name: str, folder: Path) -> None:
        change(folder, lambda tensors: tensors.pop(name))
        assert f"missing are {name}" in refusal(folder)

    def test_a_whole_layer_that_is_missing_is_named_by_its_tensors(self, folder: Path) -> None:
        def drop(tensors: Tensors) -> None:
            for name in [name for name in tensors if ".layers.1." in name]:
                del tensors[name]

        change(folder, drop)
        said = refusal(folder)
        assert said.count("model.layers.1.") == 9 and "missing are" in said

    def test_ten_names_are_enough(self, folder: Path) -> None:
        more = {f"more.{i}": torch.ones(1) for i in range(25)}
        change(folder, lambda tensors: tensors.update(more))
        assert refusal(folder).count("more.") == 10 and "and 15 more" in refusal(folder)

    def test_a_bias_that_the_config_promises(self, folder_of: FolderOf) -> None:
        folder = folder_of("qwen2")
        change(folder, lambda tensors: tensors.pop(QWEN2_BIAS))
        assert f"missing are {QWEN2_BIAS}" in refusal(folder)

    @pytest.mark.parametrize(
        "name", ["score.weight", "model.layers.0.self_attn.q_proj.bias", "v_head.summary.weight", "foo"]
    )
    def test_a_left_over_one_is_named(self, name: str, folder: Path) -> None:
        change(folder, lambda tensors: tensors.update({name: torch.ones(3)}))
        assert f"left over are {name}" in refusal(folder)

    def test_more_layers_than_the_config_has(self, folder: Path) -> None:
        configure(folder, num_hidden_layers=1)
        assert "config.json has 1 layers, and left over are model.layers.1." in refusal(folder)

    @pytest.mark.parametrize(
        ("name", "shape"), [(EMBEDDING, (220, 48)), (LM_HEAD, (211, 40)), (NORM, (47,)), (MATRIX, (48, 96))]
    )
    def test_another_shape_is_named(self, name: str, shape: tuple[int, ...], folder: Path) -> None:
        own = list(load_file(folder / WEIGHTS)[name].shape)
        change(folder, lambda tensors: tensors.update({name: torch.ones(shape)}))
        assert f"{name} is {list(shape)}, expected {own}" in refusal(folder)

    @pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool, torch.int64])
    def test_integers_are_no_weights(self, dtype: torch.dtype, folder: Path) -> None:
        change(folder, lambda tensors: tensors.update({MATRIX: tensors[MATRIX].to(dtype)}))
        assert "no floating point numbers" in refusal(folder) and MATRIX in refusal(folder)

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
    def test_eight_bits_are_a_format(self, dtype: torch.dtype, folder: Path) -> None:
        change(folder, lambda tensors: tensors.update({MATRIX: tensors[MATRIX].to(dtype)}))
        assert f"quantised weights (FP8, as {MATRIX} is F8_" in refusal(folder)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
    def test_other_floating_point_numbers_are_rounded(self, dtype: torch.dtype, folder: Path) -> None:
        expected = load(folder).state_dict()[MATRIX]
        change(folder, lambda tensors: tensors.update({MATRIX: tensors[MATRIX].to(dtype)}))
        found = load(folder).state_dict()[MATRIX]
        assert found.dtype == torch.float32 and torch.equal(found, expected.to(dtype).float())

    def test_a_tensor_with_and_without_the_bodys_name(self, folder: Path) -> None:
        change(folder, lambda tensors: tensors.update({"norm.weight": torch.ones(48)}))
        assert "there twice, with and without 'model.'" in refusal(folder)

    @pytest.mark.parametrize("number", [0, 2, 7])
    def test_one_expert_of_many(self, number: int, folder_of: FolderOf) -> None:
        folder = folder_of("qwen3_moe", num_experts=8)
        name = f"model.layers.1.mlp.experts.{number}.up_proj.weight"
        change(folder, lambda tensors: tensors.pop(name))
        assert f"experts are missing: {name}" in refusal(folder)

    def test_one_expert_of_another_shape(self, folder_of: FolderOf) -> None:
        folder = folder_of("qwen3_moe", num_experts=8)
        name = "model.layers.1.mlp.experts.5.up_proj.weight"
        change(folder, lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))
        assert f"experts of one layer differ in shape: {name} is " in refusal(folder)

    def test_an_expert_with_another_number(self, folder_of: FolderOf) -> None:
        """There are as many as the config has, and one is not where it belongs."""
        folder = folder_of("qwen3_moe", num_experts=8)

        def move(tensors: Tensors) -> None:
            for part in ("gate", "up", "down"):
                name = f"model.layers.0.mlp.experts.{{}}.{part}_proj.weight"
                tensors[name.format(8)] = tensors.pop(name.format(3))

        change(folder, move)
        assert "experts are missing: model.layers.0.mlp.experts.3." in refusal(folder)

    @pytest.mark.parametrize("count", [7, 9])
    def test_other_numbers_of_experts_than_the_config_has(self, count: int, folder_of: FolderOf) -> None:
        folder = folder_of("qwen3_moe", num_experts=8)
        configure(folder, num_experts=count, num_local_experts=count)
        assert "of another shape are model.layers.0.mlp." in refusal(folder)


class TestFiles:
    def test_a_missing_shard(self, folder: Path) -> None:
        _, second = shard(folder)
        (folder / second).unlink()
        assert refusal(folder) == f"1 of 2 files of weights are missing: {second}"

    def test_a_shard_without_the_tensor_that_the_index_names(self, folder: Path) -> None:
        first, _ = shard(folder)
        tensors = load_file(folder / first)
        name = sorted(tensors)[0]
        save_file({each: tensor for each, tensor in tensors.items() if each != name}, folder / first)
        assert refusal(folder) == f"tensors are not in the files that {INDEX} names: {name}"

    def test_a_tensor_in_two_shards(self, folder: Path) -> None:
        first, second = shard(folder)
        tensors, others = load_file(folder / first), load_file(folder / second)
        name = sorted(tensors)[0]
        save_file(others | {name: tensors[name]}, folder / second)
        assert f"there twice, in {second} too: {name}" in refusal(folder)

    def test_one_file_beside_an_index_of_others(self, folder: Path) -> None:
        whole = (folder / WEIGHTS).read_bytes()
        shard(folder)
        (folder / WEIGHTS).write_bytes(whole)
        assert "lies beside an index that does not name it" in refusal(folder)

    @pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 10**5])
    def test_an_index_that_is_none(self, text: str, folder: Path) -> None:
        shard(folder)
        (folder / INDEX).write_text(text)
        assert INDEX in refusal(folder)

    @pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "pytorch_model.bin"])
    def test_an_index_names_files_of_its_folder(self, file: str, folder: Path) -> None:
        shard(folder)
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
        assert "no safetensors file of this folder" in refusal(folder)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt"])
    def test_pickles_alone_are_never_read(self, name: str, folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / name)
        assert f"only pickled weights ({name})" in refusal(folder)

    @pytest.mark.parametrize("name", ["tf_model.h5", "flax_model.msgpack", "model.onnx"])
    def test_other_formats_alone(self, name: str, folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / name)
        assert f"only weights of another format ({name})" in refusal(folder)

    def test_safetensors_by_another_name(self, folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "consolidated.safetensors")
        assert "no model.safetensors and no index of several files, only consolidated.safetensors" in refusal(folder)

    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            *itertools.product((WEIGHTS, "config.json"), ("a fifo", "a device", "a folder")),
            *itertools.product(("tokenizer.json", "generation_config.json"), ("a fifo", "a device")),
        ],
    )
    def test_only_regular_files_are_opened(self, name: str, kind: str, folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        if kind == "a fifo":
            os.mkfifo(folder / name)
        elif kind == "a device":
            (folder / name).symlink_to("/dev/zero")
        else:
            (folder / name).mkdir()
        assert refusal(folder) == f"{name} is no regular file but {kind}"

    @pytest.mark.parametrize("target", ["/absent", WEIGHTS])
    def test_a_link_to_nothing(self, target: str, folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / WEIGHTS).symlink_to(target)
        assert refusal(folder) == f"{WEIGHTS} is a link to a file that is not there"

    def test_a_file_that_is_cut_short(self, folder: Path) -> None:
        path = folder / WEIGHTS
        path.write_bytes(path.read_bytes()[:-1])
        assert "it was cut short" in refusal(folder)

    @pytest.mark.parametrize("keep", [0, 7, 8, 100])
    def test_a_file_without_a_header(self, keep: int, folder: Path) -> None:
        path = folder / WEIGHTS
        path.write_bytes(path.read_bytes()[:keep])
        assert "no safetensors file" in refusal(folder)

    def test_a_file_that_is_cut_short_while_it_is_read(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Mapped, it would end the process by SIGBUS."""
        read, cut = tensors_module.read_into, threading.Event()

        def cutting(descriptor: int, place: memoryview, offset: int, name: str) -> None:
            if not cut.is_set():
                cut.set()
                os.truncate(folder / WEIGHTS, 4096)
            read(descriptor, place, offset, name)

        monkeypatch.setattr(tensors_module, "read_into", cutting)
        assert refusal(folder).startswith(f"{WEIGHTS} ")
        assert cut.is_set()


def written(path: Path, header: bytes, values: int = 0) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(values))
    return path


class TestHeaders:
    def test_a_header_is_bounded_before_it_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / WEIGHTS
        with path.open("wb") as file:
            file.write(struct.pack("<Q", 53_000_000))
            file.truncate(60_000_000)
        with pytest.raises(CheckpointRefused, match=f"53000000 bytes, at most {HEADER_BYTES} are read"):
            read_header(path)

    @pytest.mark.parametrize(
        ("header", "said"),
        [
            (b"[]", "no JSON object"),
            (b"{", "no JSON"),
            (b"[" * 100_000, "no JSON"),
            (b'{"a": {}}', "a has no dtype"),
            (b'{"a": 1}', "a has no dtype"),
            (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "a has no dtype"),
            (b'{"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}}', "a has no dtype"),
            (b'{"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}', "unknown type F31"),
            (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "has 4 bytes, not those of F32"),
            (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', "begins at byte"),
            (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {}}', "a is there twice"),
        ],
    )
    def test_what_is_no_header(self, header: bytes, said: str, tmp_path: Path) -> None:
        with pytest.raises(CheckpointRefused, match=said):
            read_header(written(tmp_path / WEIGHTS, header, 4))

    def test_tensors_may_not_overlap(self, tmp_path: Path) -> None:
        entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
        with pytest.raises(CheckpointRefused, match="begins at byte"):
            read_header(written(tmp_path / WEIGHTS, json.dumps({"a": entry, "b": entry}).encode(), 4))

    def test_descriptors_are_closed(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(CheckpointRefused, match="a fifo"), opened(tmp_path / "fifo"):
                pass
        assert len(os.listdir("/proc/self/fd")) == before


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    """No hybrid of Mamba layers that transformers had written could be read again."""
    config = AutoConfig.for_model("bamba", mamba_n_groups=1, time_step_limit=(0.0, float("inf")))
    config.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert tuple(read_configuration(tmp_path).time_step_limit) == (0.0, float("inf"))


def test_the_rotary_base_of_dbrx_is_read_where_it_is_published(tmp_path: Path) -> None:
    entries = {"model_type": "dbrx", "attn_config": {"rope_theta": 500000, "kv_n_heads": 8}, "ffn_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    assert read_configuration(tmp_path).rope_parameters["rope_theta"] == 500000


class TestFormats:
    @pytest.mark.parametrize(
        ("settings", "name"),
        [
            ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
            ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "modelopt, NVFP4"),
            ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
            ({"quantization_config": {"bits": 4}}, "of some kind"),
            ({"quantization": {"group_size": 64, "bits": 4}}, "MLX"),
            ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
            ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
            ({"quantization_config": {"quant_method": "a\nb"}}, "'a\\nb'"),
        ],
    )
    def test_by_config_json(self, settings: dict[str, Any], name: str, folder: Path) -> None:
        configure(folder, **settings)
        assert refusal(folder).startswith(f"quantised weights ({name}) are not served")

    @pytest.mark.parametrize(
        ("file", "content", "name"),
        [
            ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "ModelOpt, FP8"),
            ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}, "ModelOpt, NVFP4"),
            ("quantize_config.json", {"bits": 4, "group_size": 128}, "GPTQ"),
            ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "version": "GEMM"}, "AWQ"),
            ("quant_config.json", {"quant_method": "awq"}, "AWQ"),
            ("quantization_config.json", {"quant_method": "aqlm"}, "aqlm"),
        ],
    )
    def test_by_a_file_beside_it(self, file: str, content: dict[str, Any], name: str, folder: Path) -> None:
        (folder / file).write_text(json.dumps(content))
        assert refusal(folder).startswith(f"quantised weights ({name}, as {file} tells) are not served")

    def test_a_quantised_cache_is_no_quantised_model(self, folder: Path) -> None:
        stated = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
        (folder / "hf_quant_config.json").write_text(json.dumps(stated))
        load(folder)

    @pytest.mark.parametrize(
        ("suffixes", "name"),
        [
            ({"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16, "g_idx": torch.int32}, "GPTQ"),
            ({"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16}, "GPTQ or AWQ"),
            ({"weight": torch.uint32, "scales": torch.float16, "biases": torch.float16}, "MLX"),
            ({"weight": torch.uint32, "scales": torch.uint8}, "MLX"),
            (
                {"weight": torch.uint8, "weight.absmax": torch.float32, "weight.quant_map": torch.float32},
                "bitsandbytes",
            ),
            ({"weight": torch.int8, "SCB": torch.float32}, "bitsandbytes"),
            ({"weight": torch.uint8, "weight_scale": torch.float8_e4m3fn, "weight_scale_2": torch.float32}, "NVFP4"),
            ({"weight_packed": torch.int32, "weight_scale": torch.bfloat16}, "compressed-tensors"),
            ({"weight": torch.float8_e4m3fn, "weight_scale_inv": torch.float32}, "FP8"),
            ({"weight": torch.int8, "weight_scale": torch.float32}, "INT8"),
            ({"weight": torch.uint8, "weight_scale": torch.bfloat16}, "packed in bytes, as BitNet's"),
            ({"weight": torch.float8_e4m3fn, "weight_scale": torch.float32, "input_scale_ub": torch.float32}, "FP8"),
            ({"weight": torch.int8, "weight_scales": torch.float16}, "EETQ"),
            ({"W_q": torch.uint8, "scale": torch.float16, "zero": torch.float16}, "HQQ"),
            ({"weight._data": torch.int8, "weight._scale": torch.float16}, "torchao or quanto"),
            ({"_weight_qdata": torch.int8, "_weight_scale": torch.float32}, "torchao"),
            ({"centroids.weight": torch.float16, "indices": torch.int32}, "VPTQ"),
            ({"weight": torch.int16, "scales": torch.float16, "tables": torch.float16}, "HIGGS"),
            ({"compressed": torch.float16, "bitmask": torch.uint8, "row_offsets": torch.int64}, "compressed-tensors"),
            ({"trellis": torch.int16, "suh": torch.float16, "svh": torch.float16}, "EXL3"),
            ({"q_weight": torch.int32, "q_scale": torch.int32, "q_groups": torch.int16}, "EXL2"),
            ({"codes": torch.int8, "codebooks": torch.float16, "scales": torch.float16}, "AQLM"),
        ],
    )
    def test_by_names_of_tensors(self, suffixes: dict[str, torch.dtype], name: str, folder: Path) -> None:
        prefix = MATRIX.removesuffix("weight")

        def quantise(tensors: Tensors) -> None:
            del tensors[MATRIX]
            tensors |= {f"{prefix}{suffix}": torch.ones(4, dtype=dtype) for suffix, dtype in suffixes.items()}

        change(folder, quantise)
        assert refusal(folder).startswith(f"quantised weights ({name}, as {prefix}")

    def test_gguf(self, folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "model.Q4_K_M.gguf")
        assert "GGUF files are not read" in refusal(folder)
        (folder / "config.json").unlink()
        assert "GGUF files are not read" in refusal(folder)

    def test_an_adapter_alone_and_beside_a_model(self, folder: Path) -> None:
        (folder / "adapter_config.json").write_text("{}")
        assert "a LoRA adapter lies beside the model" in refusal(folder)
        (folder / "config.json").unlink()
        assert "a LoRA adapter alone" in refusal(folder)

    @pytest.mark.parametrize(
        ("architecture", "what"),
        [
            ("LlamaForSequenceClassification", "a classifier or reward model"),
            ("Qwen2ForRewardModel", "a reward model"),
            ("MistralModel", "without an lm_head"),
            ("LlamaForTokenClassification", "a classifier"),
        ],
    )
    def test_models_of_other_ends(self, architecture: str, what: str, folder: Path) -> None:
        configure(folder, architectures=[architecture])
        assert architecture in refusal(folder) and what in refusal(folder)

    @pytest.mark.parametrize("file", ["modules.json", "config_sentence_transformers.json"])
    def test_an_embedding_model(self, file: str, folder: Path) -> None:
        (folder / file).write_text("[]")
        assert "an embedding model" in refusal(folder)


class TestConfiguration:
    @pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"llama"', "[" * 10**5, "\xff"])
    def test_what_is_no_object(self, text: str, folder: Path) -> None:
        (folder / "config.json").write_text(text)
        assert "config.json is no JSON" in refusal(folder)

    @pytest.mark.parametrize(
        "settings",
        [
            {"hidden_size": 0},
            {"hidden_size": -48},
            {"hidden_size": 48.5},
            {"hidden_size": "48"},
            {"hidden_size": True},
            {"hidden_size": 10**12},
            {"vocab_size": 0},
            {"vocab_size": -1},
            {"vocab_size": 10**18},
            {"num_hidden_layers": 0},
            {"num_hidden_layers": 10**9},
            {"num_hidden_layers": 60_000},
            {"num_attention_heads": 0},
            {"num_attention_heads": -4},
            {"num_key_value_heads": 0},
            {"head_dim": 0},
            {"intermediate_size": -96},
            {"max_position_embeddings": 0},
            {"max_position_embeddings": 10**15},
            {"max_position_embeddings": 512.5},
            {"max_position_embeddings": 3},
            {"sliding_window": -1},
            {"rms_norm_eps": float("inf")},
            {"rms_norm_eps": -1e-6},
        ],
        ids=str,
    )
    def test_sizes_that_no_model_has(self, settings: dict[str, Any], folder: Path) -> None:
        configure(folder, **settings)
        [(name, _)] = settings.items()
        assert refusal(folder).startswith(f"config.json has {name} ")

    @pytest.mark.parametrize(
        "settings",
        [
            {"num_local_experts": 0, "num_experts_per_tok": 0},
            {"sliding_window": None, "max_window_layers": 28},
            {"layer_types": ["full_attention"] * 2, "full_attention_layers": [0, 1]},
            {"pad_token_id": -1},
            {"pad_token_id": 32000},
            {"dtype": "bf16"},
            {"torch_dtype": "float8_e4m3fn", "dtype": ["no", "such"]},
            {"quantization_config": []},
            {"architectures": None},
        ],
        ids=str,
    )
    def test_entries_that_published_models_have(self, settings: dict[str, Any], folder: Path) -> None:
        configure(folder, **settings)
        load(folder)

    @pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "LlamaForCausalLMEagle3", "NoSuchForCausalLM"])
    def test_another_class_than_the_familys(self, name: str, folder: Path) -> None:
        configure(folder, architectures=[name])
        assert refusal(folder).startswith(f"{name} is no causal language model that is served: a llama is a Llama")

    def test_a_part_for_text_in_a_family_that_has_none(self, folder: Path) -> None:
        configure(folder, text_config={"model_type": "llama"})
        assert refusal(folder) == "config.json has a text_config, which a llama has not"

    @pytest.mark.parametrize("ends", ["x", [[1]], {}, 1.5, True, ["2"]], ids=str)
    def test_ends_that_are_no_tokens(self, ends: Any, folder: Path) -> None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        assert refusal(folder).startswith("generation_config.json has eos_token_id ")

    @pytest.mark.parametrize("settings", [{"vocab_size": 2**30}, {"intermediate_size": 2**30}], ids=str)
    def test_a_model_much_larger_than_its_files_is_not_made(self, settings: dict[str, Any], folder: Path) -> None:
        configure(folder, **settings)
        assert "config.json describes a model of" in refusal(folder)

    @pytest.mark.parametrize(
        "settings",
        [
            {"num_attention_heads": 5},
            {"num_key_value_heads": 3},
            {"hidden_act": "no such"},
            {"model_type": "no such"},
            {"model_type": None},
            {"model_type": ["llama"]},
            {"architectures": "LlamaForCausalLM"},
            {"rope_parameters": {"rope_type": "no such"}},
            {"rope_parameters": [1]},
            {"transformers_weights": "other.safetensors"},
            {"num_attention_heads": [4]},
        ],
        ids=str,
    )
    def test_what_no_model_can_be_built_from(self, settings: dict[str, Any], folder: Path) -> None:
        configure(folder, **settings)
        refusal(folder)

    def test_no_vocabulary(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        del config["vocab_size"]
        (folder / "config.json").write_text(json.dumps(config))
        assert EMBEDDING in refusal(folder) or "describes a model of" in refusal(folder)
