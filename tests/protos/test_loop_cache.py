"""Compiled loops are found again only in the state of all that was compiled into them."""

from __future__ import annotations

from pathlib import Path

import pytest

from draft_service import compiling as of_draft
from outrider.loop_cache import LoopCache
from target_service import compiling as of_target


@pytest.fixture
def cache(tmp_path: Path) -> LoopCache:
    package = tmp_path / "package"
    package.mkdir()
    (package / "loops.py").write_text("from package.compiling import compiled\n")
    (package / "plain.py").write_text("x = 1\n")
    (tmp_path / "sizes.py").write_text("SIZE = 1\n")
    return LoopCache(package, "package.compiling", (tmp_path / "sizes.py",))


@pytest.mark.parametrize(
    ("path", "differs"), [("package/loops.py", True), ("sizes.py", True), ("package/plain.py", False)]
)
def test_the_folder_is_of_what_is_compiled(cache: LoopCache, path: str, differs: bool) -> None:
    before, file = cache.folder, cache.package.parent / path
    file.write_text(file.read_text() + "# changed\n")
    assert (LoopCache(cache.package, cache.compiler, cache.others).folder != before) is differs


def test_the_loops_of_both_services_are_kept_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = {of_draft.LOOPS.folder, of_target.LOOPS.folder}
    assert len(folders) == 2 and all(len(folder.name) == 16 for folder in folders)
    # The device's layout is compiled into the target's.
    assert [path.name for path in of_target.LOOPS.others] == ["layout.py"]
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert LoopCache(tmp_path, "x").folder.parent == tmp_path


def test_loops_are_compiled_beside_where_none_are_cached(
    cache: LoopCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "loops"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    written = tmp_path / "called"
    (tmp_path / "module_of_loops.py").write_text(
        f"def compile_loops() -> None:\n    open({str(written)!r}, 'w').close()\n"
    )
    cache.compile_beside(["module_of_loops:compile_loops"])
    cache.wait()
    assert written.exists()
    written.unlink()
    # As numba leaves it.
    cache.folder.mkdir(parents=True)
    (cache.folder / "loop.nbi").touch()
    cache.compile_beside(["module_of_loops:compile_loops"])
    cache.wait()
    assert not written.exists()


def test_loops_that_cannot_be_compiled_beside_are_named(
    cache: LoopCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "loops"))
    cache.compile_beside(["no_module:compile_loops"])
    cache.wait()
    assert "no_module:compile_loops ended with status 1" in caplog.text
