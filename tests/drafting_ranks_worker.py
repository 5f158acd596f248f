"""A rank of a tiny model whose head drafts behind captured passes, without a GPU: `python drafting_ranks_worker.py FD`,
as `following.follow` is started."""

from __future__ import annotations

import sys

import pytest
import torch
from captured_ranks import DRAFT_TOKENS, captured_rank
from conftest import make_tiny
from in_pass_heads import in_pass_head
from rerun_graphs import stand_in_for_gpu

from target_service.config import TargetConfig
from target_service.model.loading.loader import RankGroupLink
from target_service.model.ranks.following import follow
from target_service.model.runner import ModelRunner


def load_rank(config: TargetConfig, link: RankGroupLink) -> ModelRunner:
    """As `loader.load_runner`, of a model and a head that every process makes alike. Steps are captured when they are
    first used."""
    del config
    model = make_tiny()
    return captured_rank(model, link, drafter=in_pass_head(model, link, DRAFT_TOKENS))


if __name__ == "__main__":
    torch.set_num_threads(1)
    stand_in_for_gpu(pytest.MonkeyPatch())
    follow(int(sys.argv[1]), load_rank)
