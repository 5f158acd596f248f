"""Processes that this project starts run no module of the folder that they are started in."""

from __future__ import annotations

import ast
import itertools
import subprocess
from pathlib import Path

import pytest
from waits import HUNG_SECONDS

from outrider.processes.python import module_command

ROOT = Path(__file__).parents[2]
PRODUCT = ("protos/outrider", "target_service", "draft_service", "clients", "kernels")


@pytest.mark.parametrize("planted", ["target_service/__init__.py", "outrider/__init__.py", "json.py", "torch.py"])
def test_a_folder_of_weights_cannot_run_its_modules(tmp_path: Path, planted: str) -> None:
    """`cd MODEL; outrider up --model .` with a folder from elsewhere."""
    module = tmp_path / planted
    module.parent.mkdir(exist_ok=True)
    module.write_text("import pathlib; pathlib.Path('ran').touch()\n")
    command = module_command("outrider.healthcheck", "--help")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HUNG_SECONDS)
    assert done.returncode == 0 and done.stdout.startswith("usage:"), done.stderr
    assert not (tmp_path / "ran").exists()


def test_every_start_of_a_module_is_by_the_one_command() -> None:
    """No other place of the product writes `-m`, or `-c`, behind the interpreter without -P."""
    wrong = []
    for path in (path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Tuple | ast.List | ast.Call):
                words = [ast.unparse(one) for one in (node.args if isinstance(node, ast.Call) else node.elts)]
                for first, then in itertools.pairwise(words):
                    if first == "sys.executable" and then != "'-P'" and then.startswith("'-"):
                        wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert wrong == []


def test_containers_start_without_the_current_folder() -> None:
    assert "PYTHONSAFEPATH=1" in (ROOT / "target_service/stack/Dockerfile").read_text()
