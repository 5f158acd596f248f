"""What many tests need of the same model, computed once in a process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from transformers import PreTrainedModel

Rest = ParamSpec("Rest")
Result = TypeVar("Result")
Of = Callable[Concatenate[PreTrainedModel, Rest], Result]


def once(function: Of[Rest, Result]) -> Of[Rest, Result]:
    """The same result for the same model, whose weights must stay, and for other arguments of the same `repr`."""
    # With the model, so that no later one has its id.
    found: dict[tuple[int, str], tuple[PreTrainedModel, Result]] = {}

    @functools.wraps(function)
    def cached(model: PreTrainedModel, *args: Rest.args, **kwargs: Rest.kwargs) -> Result:
        key = id(model), repr((args, kwargs))
        if key not in found:
            found[key] = model, function(model, *args, **kwargs)
        return found[key][1]

    return cached
