"""A drafter `MODULE:CLASS` of the user, found on Python's path, or else in the current folder.

The drafter is made by `CLASS(config)` if the class has an attribute `config`, a settings class whose flags the service
then takes, and by `CLASS()` otherwise. Errors in it are reported in one line, before anything is served.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

from draft_service.drafters.base import Drafter, DrafterSpec
from outrider.errors import NotSupported, OutriderError
from outrider.settings import Settings, SettingsError
from outrider.wire.frames import TreeLimits

_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_HINT = "docs/drafters.md has one of thirty lines"


def spec_of(name: str) -> DrafterSpec:
    """The spec of `MODULE:CLASS`. Its settings are in the section `[drafter]`. Raises `NotSupported` for what cannot be
    found, cannot be imported, or is no drafter."""
    if not _NAME.fullmatch(name):
        raise NotSupported(f"{name!r} names no drafter: one of your own is MODULE:CLASS, such as mine.drafting:Mine")
    module_name, _, class_name = name.partition(":")
    found = getattr(_imported(name, module_name), class_name, None)
    if found is None:
        raise NotSupported(f"{name}: the module {module_name} has no {class_name}")
    if not inspect.isclass(found):
        raise NotSupported(f"{name}: {class_name} is no class")
    _check_methods(name, found)
    config = getattr(found, "config", Settings)
    if not (inspect.isclass(config) and is_dataclass(config) and all("help" in one.metadata for one in fields(config))):
        raise NotSupported(f"{name}: its config is no settings class, a frozen dataclass of setting(..); {_HINT}")
    given = config is not Settings
    return DrafterSpec("drafter", config, lambda settings: _made(name, found, (settings,) if given else ()))


def _imported(name: str, module_name: str) -> ModuleType:
    try:
        with _current_folder_last():
            return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise NotSupported(f"{name}: {module_name} needs {missing}, which is not installed here") from None
        raise NotSupported(
            f"{name}: there is no module {missing} on Python's path: start this where the module is, or name its "
            "folder in PYTHONPATH"
        ) from None
    # The user's module may fail in any way.
    except Exception as error:
        raise NotSupported(f"{name}: {module_name} cannot be imported: {_where(error)}") from None


@contextmanager
def _current_folder_last() -> Iterator[None]:
    """Services start without the current folder on the path (`outrider.processes.python`). A module that is named may
    be there; behind all else, so that it stands for nothing but itself."""
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        yield
    finally:
        # Of equal entries the last, which is this one.
        last = len(sys.path) - 1 - sys.path[::-1].index(folder)
        del sys.path[last]


def _check_methods(name: str, found: type) -> None:
    """Raise `NotSupported` for missing methods. `Drafter` has defaults for all but `propose`."""
    methods = ("start", "stop", "open", "advance", "propose", "close", "stats")
    missing = [method for method in methods if not callable(getattr(found, method, None))]
    if "propose" not in missing and getattr(found, "propose", None) is Drafter.propose:
        missing.append("propose")
    if missing:
        inherit = "" if Drafter in found.__mro__ else ", and does not inherit draft_service.drafters.base.Drafter"
        raise NotSupported(f"{name}: it is no drafter: it has no {', '.join(missing)}{inherit}; {_HINT}")


def _made(name: str, found: Callable[..., Any], settings: tuple[Any, ...]) -> Drafter:
    """The drafter, with all attributes that a service reads checked."""
    try:
        drafter: Drafter = found(*settings)
    except (SettingsError, OutriderError):
        raise
    # The user's class may fail in any way.
    except Exception as error:
        raise NotSupported(f"{name}: it cannot be made: {_where(error)}") from None
    attributes = {"name": str, "limits": TreeLimits, "max_context": int, "vocabulary_size": int}
    for attribute, kind in attributes.items():
        if not isinstance(getattr(drafter, attribute, None), kind):
            raise NotSupported(f"{name}: it is no drafter: its {attribute} is no {kind.__name__}; {_HINT}")
    if not drafter.name:
        raise NotSupported(f"{name}: its name is empty")
    return drafter


def _where(error: Exception) -> str:
    """The error, and the line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    message = f"{type(error).__name__}: {error}".splitlines()[0]
    return message if isinstance(error, SyntaxError) else f"{message} ({last.filename}:{last.lineno})"
