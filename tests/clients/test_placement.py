"""Where `outrider up` puts its services on a machine with GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.heads import shipped_heads
from outrider.named_heads import named_settings
from outrider_client.local.models import DEFAULT_MODEL
from outrider_client.local.placement import GpuPlacement, place, visible_gpus


def test_gpus_are_counted_as_cuda_shows_them(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "tty0"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == 3
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,2"}, tmp_path) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == 0
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path / "absent") == 0


def test_nothing_is_placed_without_a_gpu_or_where_the_user_did() -> None:
    assert place(0, "merged", "", [], []) == GpuPlacement()
    assert place(2, "merged", "", ["--device", "cpu"], []) == GpuPlacement()
    assert place(2, "merged", "", [], ["--device=cuda:0"]) == GpuPlacement()


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("drafter", ["merged", "eagle", "mtp"])
def test_a_head_runs_in_the_targets_passes(drafter: str, gpus: int, ranks: int) -> None:
    (head,) = {head.name for head in shipped_heads()}
    usual = ["--tensor-parallel", str(ranks), "--attention", "triton"]
    placed = place(gpus, drafter, "", usual, [])
    assert placed.in_pass and placed.shared and "in its passes" in placed.summary
    assert placed.target == ("--device", "cuda:0")
    own = ("--base-model", DEFAULT_MODEL) if drafter == "mtp" else ("--cuda-graphs", "--head", head)
    assert placed.draft == ("--device", "cuda:0", *own)
    for words in (["--attention", "flashinfer"], ["--draft-head", "X"], ["--lockstep"], ["--no-speculation"]):
        assert not place(gpus, drafter, "", words, []).in_pass
    assert not place(gpus, drafter, "", [], [], {("target", "draft_head"): "X"}).in_pass


def test_an_assistant_runs_in_the_targets_passes_alone() -> None:
    """With a GPU and without, also where nothing else is placed, so that the target refuses what it cannot serve. A
    service of its own is started where one is asked for, and refuses by itself."""
    placed = place(2, "assistant", "", [], ["--head", "some/head"])
    assert placed.in_pass and placed.shared and "in its passes" in placed.summary
    assert (placed.target, placed.draft) == (("--device", "cuda:0"), ("--device", "cuda:0", "--cuda-graphs"))
    for gpus, words in ((0, []), (2, ["--device", "cpu"]), (2, ["--attention", "flashinfer"])):
        placed = place(gpus, "", "", words, [], {("draft", "drafter"): "assistant"})
        assert placed.in_pass and placed.shared
    for gpus in (0, 1, 2):
        assert not place(gpus, "assistant", "", [], [], apart=True).in_pass


@pytest.mark.parametrize(("gpus", "device"), [(1, "cuda:0"), (2, "cuda:1"), (8, "cuda:1")])
def test_a_head_of_its_own_runs_on_the_second_gpu_if_there_is_one(gpus: int, device: str) -> None:
    placed = place(gpus, "merged", "", [], [], apart=True)
    assert placed.target[:2] == ("--device", "cuda:0") and placed.draft[:3] == ("--device", device, "--cuda-graphs")
    assert device in placed.summary
    (head,) = {head.name for head in shipped_heads()}
    assert placed.target[2:] == ("--draft-head", head) and placed.draft[3:] == ("--head", head)


@pytest.mark.parametrize("drafter", ["merged", "eagle", "model", "medusa", "mtp", "trie", "none", ""])
def test_one_gpu_is_shared_by_a_draft_that_runs_a_network(drafter: str) -> None:
    placed = place(1, drafter, "", [], [], apart=True)
    assert placed.shared == (drafter in ("merged", "eagle", "model", "medusa", "mtp"))
    assert ("which it shares with the target" in placed.summary) == placed.shared
    assert not place(2, drafter, "", [], [], apart=True).shared and not place(0, drafter, "", [], []).shared


def test_a_trie_stays_on_the_host() -> None:
    assert place(2, "trie", "", [], []) == GpuPlacement(("--device", "cuda:0"), (), "the target runs on cuda:0")


def test_a_head_that_the_user_names_is_named_to_the_target() -> None:
    placed = place(2, "eagle", "some/model", [], ["--head", "some/head"], apart=True)
    assert placed.target[2:] == ("--draft-head", "some/head") and "--head" not in placed.draft
    placed = place(2, "eagle", "some/model", ["--draft-head", "other"], ["--head=some/head"])
    assert "--draft-head" not in placed.target


def test_settings_of_file_and_environment_are_not_overridden(tmp_path: Path) -> None:
    path = tmp_path / "outrider.toml"
    path.write_text('[target]\ndevice = "cpu"\n[eagle]\nhead = "some/head"\n')
    assert place(2, "merged", "", [], [], named_settings({}, path)) == GpuPlacement()
    assert place(2, "eagle", "", [], [], named_settings({"OUTRIDER_EAGLE_DEVICE": "cpu"}, None)) == GpuPlacement()
    # Of a drafter that is not used.
    assert place(2, "trie", "", [], [], named_settings({"OUTRIDER_EAGLE_DEVICE": "cpu"}, None)) != GpuPlacement()
    path.write_text('[draft]\ndrafter = "eagle"\n[eagle]\nhead = "some/head"\n')
    placed = place(2, "", "", [], [], named_settings({}, path), apart=True)
    assert placed.draft == ("--device", "cuda:1", "--cuda-graphs")
    assert placed.target[2:] == ("--draft-head", "some/head")
    placed = place(2, "", "", [], [], named_settings({"OUTRIDER_TARGET_DRAFT_HEAD": "other"}, path))
    assert placed.target == ("--device", "cuda:0")
    path.write_text("[target")
    assert named_settings({}, path) == {} == named_settings({}, tmp_path / "absent")


def test_medusa_heads_are_fed_and_not_captured() -> None:
    """None comes with Outrider, so that of the settings is the only one, and their drafter has no graphs."""
    assert place(2, "medusa", DEFAULT_MODEL, [], ["--head", "some/heads"]) == GpuPlacement(
        ("--device", "cuda:0", "--draft-head", "some/heads"),
        ("--device", "cuda:1"),
        "the target runs on cuda:0, the draft on cuda:1",
    )
    assert place(1, "medusa", DEFAULT_MODEL, [], []).target == ("--device", "cuda:0")
    merged = ["--merged-drafters", "medusa,trie", "--head", "some/heads"]
    assert place(1, "merged", "some/model", [], merged).draft == ("--device", "cuda:0")
    named = named_settings({"OUTRIDER_MEDUSA_HEAD": "other/heads"}, None)
    assert place(1, "medusa", "some/model", [], [], named).target[-1] == "other/heads"


def test_an_mtp_module_is_the_models_own() -> None:
    in_passes = place(2, "mtp", "some/model", [], [])
    assert in_passes.in_pass and in_passes.draft == ("--device", "cuda:0", "--base-model", "some/model")
    # Where it is apart, or modules draft that passes do not.
    apart = place(2, "mtp", "some/model", [], [], apart=True)
    assert apart == place(2, "mtp", "some/model", [], ["--num-modules", "2"])
    assert apart == place(2, "mtp", "some/model", [], [], {("mtp", "num_modules"): "2"})
    assert not place(2, "merged", "some/model", [], ["--merged-drafters", "mtp,eagle"]).in_pass
    assert apart == GpuPlacement(
        ("--device", "cuda:0", "--draft-head", "some/model"),
        ("--device", "cuda:1", "--base-model", "some/model"),
        "the target runs on cuda:0, the draft on cuda:1",
    )
    assert place(1, "mtp", "some/model", [], ["--base-model", "other"], apart=True).target[-1] == "other"
    merged = place(1, "merged", "some/model", [], ["--merged-drafters", "mtp,trie"])
    assert merged.draft == ("--device", "cuda:0", "--base-model", "some/model")
    # Blanks are allowed, as in the draft's own reading.
    assert place(1, "merged", "some/model", [], ["--merged-drafters", "trie, mtp"]) == merged
    assert place(1, "merged", "some/model", [], [], {("merged", "merged_drafters"): "trie , mtp"}) == merged
    named = named_settings({"OUTRIDER_MTP_BASE_MODEL": "named"}, None)
    assert place(1, "mtp", "", [], [], named, apart=True).target[-1] == "named"


@pytest.mark.parametrize(
    ("gpus", "ranks", "device"), [(4, 2, "cuda:2"), (3, 2, "cuda:2"), (2, 2, "cuda:1"), (1, 2, "cuda:0")]
)
def test_the_ranks_of_a_target_come_first(gpus: int, ranks: int, device: str) -> None:
    placed = place(gpus, "merged", "", ["--tensor-parallel", str(ranks)], [], apart=True)
    assert placed.draft[:2] == ("--device", device) and not placed.shared
    assert placed.summary.startswith(f"the target runs on cuda:0 to cuda:{ranks - 1}, the draft on {device}")
    assert placed.summary.endswith("which it shares with the target") is (gpus <= ranks)
    assert place(gpus, "merged", "", [], [], {("target", "tensor_parallel"): str(ranks)}, apart=True) == placed
    # The target refuses it.
    assert place(gpus, "merged", "", ["--tensor-parallel", "two"], []) == place(gpus, "merged", "", [], [])
