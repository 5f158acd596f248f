"""How the SDK of each language is built from its sources, and used as a user would install it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from sdk.go_modules import copy_tracked, publish_libraries, publish_sources

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "clients"
BUILD = ROOT / "build"
GO = BUILD / "go"
# A path that go get can fetch; the repository's own is not known here.
GO_MODULE = "example.com/team/outrider/clients/go"
GO_VERSION = "v0.1.0"
EXAMPLES = ("chat", "sampling")
# Of a compiler, beside as many processes as there are.
HANGS = 1500


@dataclass(frozen=True)
class Toolchain:
    """How one language's SDK is built, run and generated."""

    language: str
    # The SDK's own sources.
    folder: Path
    # A project that uses the SDK as a user would install it.
    consumer: Path
    environment: dict[str, str]
    # Its conformance program; examples and their names.
    conformance: tuple[str, ...]
    examples: dict[str, tuple[str, ...]]
    generate: tuple[str, ...]
    generated: str

    def run(self, *argv: str, folder: Path | None = None) -> str:
        """What a build step prints. Fails with everything that it printed."""
        where = folder or self.folder
        done = subprocess.run(argv, cwd=where, env=self.environment, capture_output=True, text=True, timeout=HANGS)
        if done.returncode:
            pytest.fail(f"{' '.join(argv)}\n{done.stdout}{done.stderr}", pytrace=False)
        return done.stdout


def typescript() -> Toolchain:
    """The SDK is compiled, packed, and installed into a project of its own."""
    folder, consumer = CLIENTS / "typescript", BUILD / "typescript" / "consumer"
    return Toolchain(
        language="typescript",
        folder=folder,
        consumer=consumer,
        environment=_environment(str(folder / "node_modules" / ".bin")),
        conformance=("node", str(folder / "dist" / "conformance" / "main.js")),
        examples={name: ("node", str(folder / "dist" / "examples" / f"{name}.js")) for name in EXAMPLES},
        # With the details of gRPC's errors, which no contract of ours names.
        generate=(
            "buf",
            "generate",
            str(ROOT),
            "--template",
            "buf.gen.yaml",
            "--path",
            str(ROOT / "protos/outrider"),
            "--path",
            str(ROOT / "protos/third_party/google"),
        ),
        generated="src/gen",
    )


def build_typescript(toolchain: Toolchain) -> None:
    installed = toolchain.folder / "node_modules" / ".package-lock.json"
    lock = toolchain.folder / "package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        toolchain.run("npm", "ci", "--ignore-scripts")
    home = toolchain.consumer.parent
    shutil.rmtree(home, ignore_errors=True)
    toolchain.consumer.mkdir(parents=True)
    # Packing compiles the whole folder first.
    archive = toolchain.run("npm", "pack", "--pack-destination", str(home)).split()[-1]
    (toolchain.consumer / "package.json").write_text('{"name": "consumer", "type": "module"}')
    toolchain.run("npm", "install", "--ignore-scripts", "--no-package-lock", f"../{archive}", folder=toolchain.consumer)


def go() -> Toolchain:
    """The SDK is fetched with `go get` from a module proxy in a folder, under a path that such a proxy serves."""
    consumer, tools = GO / "consumer", GO / "debian"
    programs = {name: (str(GO / "bin" / name),) for name in ("conformance", *EXAMPLES)}
    settings = {
        "GOROOT": str(tools / "go"),
        "GOPROXY": (GO / "proxy").as_uri(),
        "GOMODCACHE": str(GO / "modules"),
        # It goes when Debian's libraries are fetched anew: their versions are go.mod's, whatever their content.
        "GOCACHE": str(GO / "cache"),
        # Programs for a moment's use: compiling them takes most, so that it leaves out what makes them fast.
        "GOFLAGS": "-mod=mod -modcacherw '-gcflags=all=-N -l' -ldflags=-w",
        "GOGC": "400",
        "GOSUMDB": "off",
        "GOTOOLCHAIN": "local",
        "GOENV": "off",
        "CGO_ENABLED": "0",
    }
    return Toolchain(
        language="go",
        folder=CLIENTS / "go",
        consumer=consumer,
        environment=_environment(str(tools / "go" / "bin"), str(tools / "usr" / "bin")) | settings,
        conformance=programs["conformance"],
        examples={name: programs[name] for name in EXAMPLES},
        generate=("buf", "generate", str(ROOT), "--template", "buf.gen.yaml", "--path", str(ROOT / "protos/outrider")),
        generated="outriderv1",
    )


def build_go(toolchain: Toolchain) -> None:
    """Publish the module under another path, vet it, and build its programs as another module sees them."""
    source, proxy, modules = GO / "source", GO / "proxy", GO / "modules"
    for folder in (proxy, modules, toolchain.consumer):
        shutil.rmtree(folder, ignore_errors=True)
    copy_tracked(toolchain.folder, source)
    toolchain.run("./set_module.sh", GO_MODULE, folder=source)
    version = publish_sources(GO_MODULE, GO_VERSION, source, proxy)
    publish_libraries((source / "go.mod").read_text(), GO / "debian" / "usr" / "share" / "gocode" / "src", proxy)
    (source / "go.sum").unlink()
    toolchain.run("go", "vet", "./...", folder=source)
    toolchain.consumer.mkdir()
    toolchain.run("go", "mod", "init", "example.com/consumer", folder=toolchain.consumer)
    toolchain.run("go", "get", f"{GO_MODULE}@{version}", folder=toolchain.consumer)
    programs = [f"{GO_MODULE}/conformance", *(f"{GO_MODULE}/examples/{name}" for name in EXAMPLES)]
    toolchain.run("go", "build", "-o", f"{GO / 'bin'}/", *programs, folder=toolchain.consumer)


BUILDS: dict[str, Callable[[Toolchain], None]] = {"typescript": build_typescript, "go": build_go}


def _environment(*folders: str) -> dict[str, str]:
    """The process's own, with programs of these folders and of this Python's first."""
    path = os.pathsep.join([*folders, str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path}
