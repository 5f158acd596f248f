"""Kernels compiled ahead of their launches: the same ones, in the same cache, nothing launched. No GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kernel_worker import work

from target_service.config import TargetConfig
from target_service.model.loading import loader
from tree_kernels.ahead import AheadCompiler

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cache = tmp_path_factory.mktemp("triton")
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    return work("ahead_worker.py", forked=True, **own)


def test_what_is_compiled_ahead_is_found_by_its_launch(found: dict[str, Any]) -> None:
    ahead = found["ahead"]
    # Each once, whatever is launched twice; what raises stops nothing before it.
    assert ahead["collected"] == ahead["compiled"] == len(ahead["found"]) >= 2
    assert all(ahead["found"])
    # Nothing was launched, and zeros are where it would have written.
    assert ahead["results"] == [[0] * 5, [0] * 16]


def test_launches_of_other_threads_stay_launches(found: dict[str, Any]) -> None:
    assert found["warmed"] == [False, True]


def test_constants_of_one_name_have_one_value(found: dict[str, Any]) -> None:
    assert found["ambiguous"] == []


def test_what_cannot_be_compiled_ahead_stops_nothing(found: dict[str, Any]) -> None:
    not_json, no_module = found["ahead"]["failed"]
    assert "JSONDecodeError" in not_json and "ModuleNotFoundError" in no_module
    assert found["without"] == [found["ahead"]["collected"], 0]


def test_what_was_compiled_once_is_not_collected_again(found: dict[str, Any]) -> None:
    assert found["kept"] == [[False, True], [False, True], [True, True], [False, True]]


def test_a_start_depends_on_no_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "a GPU")
    first = TargetConfig(model=str(tmp_path), device="cuda", draft="unix:/a.sock")
    moved = replace(first, listen="unix:/b.sock", metrics_listen="127.0.0.1:1", draft="unix:/b.sock")
    others = [replace(first, draft=draft) for draft in ("", "inpass:eagle", "inpass:mtp")]
    texts = [loader._launched(config) for config in (first, *others, replace(first, max_running=7))]
    assert loader._launched(moved) == texts[0] and len(set(texts)) == len(texts)
    (tmp_path / "config.json").write_text("{}")
    assert loader._launched(first) != texts[0]


def test_a_cache_that_cannot_be_written_stops_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = tmp_path / "a file"
    taken.touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(taken))
    monkeypatch.setattr("tree_kernels.ahead.compiling.CompilerProcesses", lambda *_: SimpleNamespace(close=list))
    for _ in range(2):
        compiler = AheadCompiler((), 1, "all")
        compiler.close(whole=True)
        assert not compiler.is_kept


def test_sizes_are_rehearsed_in_the_order_of_their_capture(found: dict[str, Any]) -> None:
    steps = found["steps"]
    sizes, names = steps["sizes"], steps["names"]
    # The largest, which every step fits, then decoding and trees before chunks of prompts, small before large.
    assert sizes[0] == [128, 16] and sizes[1:5] == [[1, 1], [4, 4], [4, 1], [16, 16]] and sizes[-1] == [128, 1]
    assert len({tuple(size) for size in sizes}) == len(sizes)
    every = {name for of_size in names for name in of_size}
    assert {"attention_kernel", "schedule_kernel", "rotary_kernel", "activated_kernel", "add_kernel"} <= every
    # Most sizes share kernels with those before them.
    assert names[0] and names[1] and not all(names)
    assert not steps["written"]
    # A few layers launch all kernels.
    assert steps["left"] == []
