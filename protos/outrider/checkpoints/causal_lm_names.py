"""transformers' causal language models by name."""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path


@functools.cache
def causal_lm_names() -> Mapping[str, str]:
    """Classes of causal language models by `model_type`. Read from the module's text where that has them as plain
    names: it imports generation and PyTorch's compiler, which takes seconds and which no model with layers of ours
    needs."""
    spec = find_spec("transformers.models.auto.modeling_auto")
    assert spec is not None and spec.origin is not None, "transformers is installed"
    for line in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        match line:
            case ast.Assign([ast.Name(id=name)], ast.Call(args=[names])) if name == "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES":
                with contextlib.suppress(ValueError):
                    return dict(ast.literal_eval(names))
            case _:
                pass
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
