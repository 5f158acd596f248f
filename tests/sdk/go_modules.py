"""A module proxy in a folder, so that `go get` fetches the Go SDK and what it needs without a network.

The libraries are Debian's sources under the versions that `go.mod` names. Their checksums differ from the published
ones, so `go.sum` takes no part here.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_REQUIREMENT = re.compile(r"^\s+(\S+) (v\S+)", re.MULTILINE)
_GO_LINE = re.compile(r"^go (\S+)", re.MULTILINE)
# What Debian's build of gRPC imports and the published one does not.
_OF_DEBIAN = {"github.com/golang/protobuf": "v1.5.4"}


@dataclass(frozen=True)
class Module:
    """A module at a version, and the folder of its files."""

    path: str
    version: str
    folder: Path

    def publish(self, proxy: Path, manifest: str, files: Iterable[Path]) -> None:
        """Lay the module where a proxy serves it."""
        versions = proxy / self.path / "@v"
        versions.mkdir(parents=True)
        (versions / "list").write_text(self.version + "\n")
        (versions / f"{self.version}.info").write_text(f'{{"Version": "{self.version}"}}')
        (versions / f"{self.version}.mod").write_text(manifest)
        with zipfile.ZipFile(versions / f"{self.version}.zip", "w") as archive:
            archive.writestr(f"{self.path}@{self.version}/go.mod", manifest)
            for file in files:
                archive.write(file, f"{self.path}@{self.version}/{file.relative_to(self.folder)}")


def publish_sources(path: str, version: str, folder: Path, proxy: Path) -> str:
    """A folder with a go.mod as a module. Returns its version: the given one, marked with a digest of the files.

    Go takes a module's version for its content: it keeps the imports of each package under the version's folder, in the
    cache of compiled packages. Other sources under a version that it knows would be compiled with the old imports, and
    fail with "could not import ... (open : no such file or directory)".
    """
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(folder)} {file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    # A part of digits alone must not begin with a zero.
    module = Module(path, f"{version}-d{digest.hexdigest()[:12]}", folder)
    manifest = folder / "go.mod"
    module.publish(proxy, manifest.read_text(), (file for file in files if file != manifest))
    return module.version


def publish_libraries(requirements: str, sources: Path, proxy: Path) -> None:
    """Every module that a go.mod requires, from the sources of a GOPATH."""
    versions = dict(_REQUIREMENT.findall(requirements)) | _OF_DEBIAN
    for path, version in versions.items():
        library = Module(path, version, sources / path)
        library.publish(proxy, _manifest(library, versions), _sources(library.folder))


def _manifest(library: Module, versions: dict[str, str]) -> str:
    """The library's go.mod, cut to what this proxy serves."""
    given = library.folder / "go.mod"
    said = given.read_text() if given.exists() else ""
    language = _GO_LINE.search(said)
    lines = [f"module {library.path}", f"go {language[1] if language else '1.24'}"]
    lines += [f"require {path} {versions[path]}" for path, _ in _REQUIREMENT.findall(said) if path in versions]
    return "\n".join(lines) + "\n"


def _sources(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.rglob("*")):
        unneeded = file.name in ("go.mod", "go.sum") or file.name.endswith("_test.go") or "testdata" in file.parts
        if file.is_file() and not unneeded:
            yield file


def tracked(folder: Path) -> list[Path]:
    """The files of a folder that a repository would hold, new ones included."""
    listed = subprocess.run(
        ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"),
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return [folder / name for name in listed.stdout.split("\0") if name and (folder / name).exists()]


def copy_tracked(folder: Path, to: Path) -> None:
    """A fresh copy of what a repository would hold of a folder."""
    shutil.rmtree(to, ignore_errors=True)
    for file in tracked(folder):
        target = to / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
