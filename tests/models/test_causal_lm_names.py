"""Names of transformers' models, and what a target imports before it knows its model."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from outrider.checkpoints import causal_lm_names


def test_names_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    expected = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert causal_lm_names.causal_lm_names() == expected
    # Where its text has them in another form.
    for text in ("", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict([*others, ('llama', 'LlamaForCausalLM')])"):
        other = ast.parse(text)
        with monkeypatch.context() as patched:
            patched.setattr("ast.parse", lambda *_, other=other: other)
            assert causal_lm_names.causal_lm_names.__wrapped__() == expected


def test_a_target_imports_no_compiler_and_no_model() -> None:
    """Each of them takes seconds of every start."""
    code = "import sys, target_service.assembly; print(*sys.modules)"
    run = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    imported = set(run.stdout.split())
    assert "transformers" in imported
    assert not imported & {
        "torch._dynamo",
        "torch._inductor",
        "transformers.modeling_utils",
        "transformers.generation.utils",
    }
