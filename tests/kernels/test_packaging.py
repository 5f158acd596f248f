"""The folder `kernels` must not look like PyPI's package of that name, and its package stands on PyTorch alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from waits import HUNG_SECONDS

import tree_kernels

REPOSITORY = Path(__file__).parents[2]
ALLOWED = {"torch", "triton", "numpy", "flashinfer", "tree_kernels"} | set(sys.stdlib_module_names)


def test_the_folder_is_no_package() -> None:
    assert not (REPOSITORY / "kernels" / "__init__.py").exists()
    assert Path(tree_kernels.__file__).parent == REPOSITORY / "kernels" / "tree_kernels"


def test_transformers_loads_models_from_the_repository_root() -> None:
    """As this process has. Models ask whether there is a package `kernels`, which the folder is found as."""
    from transformers import LlamaForCausalLM
    from transformers.utils import import_utils

    assert (
        str(REPOSITORY) in sys.path and str(REPOSITORY / "kernels") in find_spec("kernels").submodule_search_locations
    )
    assert LlamaForCausalLM.__module__ in sys.modules and not import_utils.is_kernels_available.__wrapped__()


def test_the_package_imports_nothing_else_of_ours() -> None:
    for path in Path(tree_kernels.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path.name}: relative import"
                names = [node.module or ""]
            else:
                continue
            assert {name.split(".")[0] for name in names} <= ALLOWED, path.name


def test_importing_the_package_imports_no_backend() -> None:
    code = (
        "import sys, tree_kernels.attention, tree_kernels.verification, tree_kernels.philox;"
        "assert not {'triton', 'flashinfer', 'tree_kernels.attention.triton_backend'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=HUNG_SECONDS)
