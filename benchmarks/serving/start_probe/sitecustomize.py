"""Loaded by every Python process of a measured start: notes what it compiles and where its threads are.

Writes one line of JSON for each kernel that Triton compiles or reads from its cache, and once a second how often a
place of our packages was running, into `OUTRIDER_START_FOLDER`. Nothing happens without that variable.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

_PACKAGES = ("target_service", "draft_service", "outrider", "tree_kernels", "tree_models")
# Of a sample, and of what is written. Chosen: a start takes tens of seconds.
_SAMPLE_SECONDS, _WRITE_SECONDS = 0.02, 1.0
# Innermost frames of ours that name a place.
_FRAMES = 4


class _Probe:
    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.getpid()}.jsonl"
        self._places: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._listening = False
        threading.Thread(target=self._run, name="start probe", daemon=True).start()

    def _write(self, **entry: Any) -> None:
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps({"t": time.time(), "pid": os.getpid(), **entry}) + "\n")

    def _run(self) -> None:
        self._write(kind="process", command=" ".join(sys.orig_argv)[:300])
        written = time.monotonic()
        while True:
            time.sleep(_SAMPLE_SECONDS)
            if not self._listening:
                self._listening = self._listen()
            for ident, frame in sys._current_frames().items():
                if ident != threading.get_ident() and (place := _place_of(frame)):
                    self._places[place] += 1
            if time.monotonic() - written > _WRITE_SECONDS:
                written = time.monotonic()
                self._write(kind="places", seconds=_SAMPLE_SECONDS, places=dict(self._places))
                self._places.clear()

    def _listen(self) -> bool:
        """Have Triton tell of kernels, once it is imported."""
        knobs = sys.modules.get("triton.knobs")
        if knobs is None or not hasattr(knobs, "compilation"):
            return False

        def compiled(*, src: Any, metadata: Any, times: Any, cache_hit: bool, **_: Any) -> None:
            constants = {str(place): str(value) for place, value in getattr(src, "constants", {}).items()}
            attributes = {str(place): str(value) for place, value in getattr(src, "attrs", {}).items()}
            stages = {name: micros / 1e3 for name, micros in getattr(times, "lowering_stages", [])}
            self._write(
                kind="kernel",
                name=str(metadata["name"]),
                hit=cache_hit,
                ms=times.total / 1e3,
                python_ms=times.ir_initialization / 1e3,
                stages=stages,
                warps=metadata.get("num_warps"),
                num_stages=metadata.get("num_stages"),
                constants=constants,
                attributes=attributes,
                signature=str(getattr(src, "signature", "")),
            )

        with contextlib.suppress(AttributeError):
            knobs.compilation.listener = compiled
        return True


def _place_of(frame: Any) -> str:
    """The innermost frames of our packages, outermost first; empty for a thread without any, and for one that waits
    for events."""
    if frame.f_code.co_name in ("wait", "select", "poll", "_worker"):
        return ""
    places: list[str] = []
    while frame is not None and len(places) < _FRAMES:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_PACKAGES):
            places.append(f"{module.rpartition('.')[2]}.{frame.f_code.co_name}")
        frame = frame.f_back
    # An event loop that waits.
    return "" if places and places[0] == "runtime.run" else " > ".join(reversed(places))


if folder := os.environ.get("OUTRIDER_START_FOLDER"):
    _Probe(Path(folder))
