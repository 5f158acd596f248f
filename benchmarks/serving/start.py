"""Where the time of a start goes: `outrider up` with cold compilers, and once more with warm ones.

    python -m benchmarks.serving.start --model MODEL [--head HEAD] [--starts 2] [--json FILE] [-- FLAGS]

The first start has empty folders for all that is compiled (Triton, PyTorch, numba, Outrider); later ones have what it
left. A start ends with the first answer over HTTP. Each process of it is sampled fifty times a second, and Triton says
what it compiles, so that the table names kernels and places. Sampling takes some percent of the time that it measures.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.shared.report import markdown_table, parser_of, provenance, show, write_json
from outrider.ports import free_port

_PROBE = Path(__file__).parent / "start_probe"
_GIVEN_UP_SECONDS = 420.0
_STOP_SECONDS = 60.0
# Rows of the tables of kernels and of places.
_MOST_ROWS = 25
# Of a place that is listed.
_LEAST_SECONDS = 0.3


@dataclass
class Start:
    """One start. Seconds are from the start of `outrider up`."""

    label: str
    listening_seconds: float = 0.0
    ready_seconds: float = 0.0
    answer_seconds: float = 0.0
    lines: list[tuple[float, str]] = field(default_factory=list)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    places: dict[str, dict[str, float]] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """What the record keeps: stages, kernels by process and name, places by process."""
        return {
            "label": self.label,
            "ready_seconds": round(self.ready_seconds, 2),
            "answer_seconds": round(self.answer_seconds, 2),
            "lines": [(round(at, 2), line) for at, line in self.lines],
            "kernels": self.kernel_rows(),
            "places": {
                process: {place: round(seconds, 2) for place, seconds in Counter(places).most_common(_MOST_ROWS)}
                for process, places in self.places.items()
            },
            "every_kernel": self.kernels,
        }

    def kernel_rows(self) -> list[dict[str, Any]]:
        """By process and kernel: how many were compiled and read from the cache, in how many seconds."""
        grouped: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for one in self.kernels:
            grouped[one["process"], one["name"]].append(one)
        rows = [
            {
                "process": process,
                "kernel": name,
                "compiled": sum(not one["hit"] for one in found),
                "from_cache": sum(one["hit"] for one in found),
                "seconds": round(sum(one["ms"] for one in found) / 1e3, 2),
                "python_seconds": round(sum(one["python_ms"] for one in found) / 1e3, 2),
            }
            for (process, name), found in grouped.items()
        ]
        return sorted(rows, key=lambda row: -row["seconds"])


def measure(label: str, command: list[str], environment: Mapping[str, str], port: int, folder: Path) -> Start:
    """Start, wait for the first answer, and stop."""
    folder.mkdir()
    start, begun = Start(label), time.monotonic()
    began = time.time()
    running = subprocess.Popen(
        command,
        env={**os.environ, **environment, "OUTRIDER_START_FOLDER": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert running.stdout is not None
    reader = threading.Thread(target=_read_lines, args=(running.stdout, start.lines, begun))
    reader.start()
    try:
        while time.monotonic() - begun < _GIVEN_UP_SECONDS and running.poll() is None:
            if not start.ready_seconds and _asked(port, "GET", "/health/ready") == 200:
                start.ready_seconds = time.monotonic() - begun
            if start.ready_seconds and _asked(port, "POST", "/v1/completions") == 200:
                start.answer_seconds = time.monotonic() - begun
                break
            time.sleep(0.1)
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            running.kill()
        reader.join(_STOP_SECONDS)
    _collect(start, folder, began, start.answer_seconds or _GIVEN_UP_SECONDS)
    return start


def _read_lines(stream: IO[str], lines: list[tuple[float, str]], begun: float) -> None:
    for line in stream:
        lines.append((time.monotonic() - begun, line.rstrip()))


def _asked(port: int, method: str, path: str) -> int:
    """The status of a request; 0 where nobody answers."""
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body if method == "POST" else None, {"content-type": "application/json"})
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def _collect(start: Start, folder: Path, began: float, seconds: float) -> None:
    """Add what the processes noted until the first answer."""
    for path in sorted(folder.glob("*.jsonl")):
        name = path.stem
        for entry in _entries(path):
            if entry["t"] - began > seconds + 1:
                continue
            if entry["kind"] == "process":
                name = f"{_process_name(entry['command'])} {path.stem}"
            elif entry["kind"] == "kernel":
                kept = {key: value for key, value in entry.items() if key not in ("kind", "pid")}
                start.kernels.append({**kept, "t": round(entry["t"] - began, 2), "process": name})
            else:
                places = start.places.setdefault(name, {})
                for place, count in entry["places"].items():
                    places[place] = places.get(place, 0.0) + count * entry["seconds"]


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            # Its process was ended while it wrote.
            return


def _process_name(command: str) -> str:
    words = command.split()
    return words[words.index("-m") + 1] if "-m" in words else command[-40:]


def report(start: Start) -> str:
    """A start as Markdown."""
    kernels = start.kernel_rows()
    compiled, hits = (sum(row[key] for row in kernels) for key in ("compiled", "from_cache"))
    parts = [
        f"## {start.label}: ready after {start.ready_seconds:.1f} s, first answer after {start.answer_seconds:.1f} s",
        f"{compiled} kernels compiled, {hits} read from the cache, "
        f"{sum(row['seconds'] for row in kernels):.1f} s together",
        "\n".join(f"    {at:7.1f} {line[:200]}" for at, line in start.lines),
    ]
    if kernels:
        parts.append(markdown_table(list(kernels[0]), [list(row.values()) for row in kernels[:_MOST_ROWS]]))
    for process, places in start.places.items():
        most = Counter(places).most_common(_MOST_ROWS)
        rows = [[place, f"{seconds:.1f}"] for place, seconds in most if seconds > _LEAST_SECONDS]
        if rows:
            parts.append(markdown_table([process, "s"], rows))
    return "\n\n".join(parts)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--head", default="")
    parser.add_argument("--drafter", default="merged")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--caches", type=Path, help="folder of what is compiled (default: an empty one)")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="of `outrider up`, behind --")
    options = parser.parse_args()
    starts = []
    with tempfile.TemporaryDirectory(prefix="start-") as scratch:
        caches = options.caches or Path(scratch) / "caches"
        environment = {
            "XDG_CACHE_HOME": str(caches),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "NUMBA_CACHE_DIR": str(caches / "numba"),
            "PYTHONPATH": os.pathsep.join([str(_PROBE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        if options.head:
            # Heads of random weights have no embedding of their own.
            environment |= {"OUTRIDER_EAGLE_HEAD": options.head, "OUTRIDER_EAGLE_EMBEDDINGS": options.model}
        for number in range(options.starts):
            port, grpc_port = free_port(), free_port()
            command = [sys.executable, "-m", "outrider_client.cli", "up", "--model", options.model]
            command += ["--drafter", options.drafter, "--port", str(grpc_port), "--http", str(port)]
            command += [word for word in options.flags if word != "--"]
            label = "cold" if not number else f"warm {number}"
            starts.append(measure(label, command, environment, port, Path(scratch) / f"start-{number}"))
            show(report(starts[-1]))
    if options.markdown:
        options.markdown.write_text("\n\n".join(map(report, starts)))
    write_json(options.json, {**provenance("serving.start"), "starts": [one.figures() for one in starts]})


if __name__ == "__main__":
    main()
