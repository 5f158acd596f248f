"""What a draft service of a benchmark is told."""

from __future__ import annotations

import pytest

from benchmarks.serving.services import DraftSettings, visible_device
from benchmarks.serving.serving import draft_settings, parse
from draft_service.config import drafter_config


@pytest.mark.parametrize(
    ("device", "seen", "visible"),
    [("cpu", None, ""), ("cuda", None, "0"), ("cuda:1", None, "1"), ("cuda:1", "4,6", "6"), ("cuda", "4,6", "4")],
)
def test_a_draft_sees_its_own_device_alone(
    device: str, seen: str | None, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert visible_device(device) == visible


def test_drafters_inside_a_merged_one_are_told_by_variables() -> None:
    flags = {"eagle": {"topk": 4, "cuda_graphs": True}, "trie": {"breadth": 2}}
    told = DraftSettings("merged", "HEAD", "MODEL", "cuda:1", flags).environment()
    eagle, trie = (drafter_config(name, environment=told) for name in ("eagle", "trie"))
    assert (eagle.head, eagle.embeddings, eagle.device) == ("HEAD", "MODEL", "cuda")
    assert (eagle.topk, eagle.cuda_graphs, trie.breadth) == (4, True, 2)


def test_each_mode_has_the_draft_that_it_names(tmp_path) -> None:  # type: ignore[no-untyped-def]
    options = parse(["--model", str(tmp_path), "--modes", "plain,trie,eagle", "--head", "HEAD"])
    drafts = [draft_settings(options, mode) for mode in options.modes]
    assert [draft and draft.drafter for draft in drafts] == [None, "trie", "eagle"]
    assert [draft.reads_features for draft in drafts if draft] == [False, True]


def test_a_head_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--modes", "plain,merged"])
    assert "need --head" in capsys.readouterr().err
