"""Which package may import which, and where gRPC may be imported at all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
OURS = {"outrider", "outrider_client", "target_service", "draft_service", "tree_kernels"}
ALLOWED = {
    "protos/outrider": {"outrider"},
    "target_service": {"target_service", "outrider", "tree_kernels"},
    "draft_service": {"draft_service", "outrider", "tree_kernels"},
    "clients/outrider_client": {"outrider_client", "outrider"},
    "kernels/tree_kernels": {"tree_kernels"},
}
# What decides, drafts or computes knows nothing of the transport.
WITHOUT_GRPC = {
    "draft_service": {"session", "drafter", "ngram_trie", "ngram_drafter", "prompt_lookup", "tree_growth", "inprocess"},
    "target_service": {"engine", "loop", "scheduler", "proposals", "row_budget", "commit", "draft_stream", "drafting"},
    "protos/outrider": {"tree", "sampling", "noise", "frames", "settings", "runtime"},
}


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_they_may(package: str) -> None:
    for path in sorted((REPOSITORY / package).rglob("*.py")):
        ours = {name.split(".")[0] for name in imported(path)} & OURS
        assert ours <= ALLOWED[package], path.relative_to(REPOSITORY)


@pytest.mark.parametrize("package", WITHOUT_GRPC)
def test_algorithms_do_not_import_the_transport(package: str) -> None:
    for module in WITHOUT_GRPC[package]:
        path = REPOSITORY / package / f"{module}.py"
        tops = {name.split(".")[0] for name in imported(path)}
        assert not tops & {"grpc", "grpc_status"}, path.relative_to(REPOSITORY)
