"""A wheel as users get it: what it holds, and that each role runs from it. Needs an index of packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import venv
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import Distribution, distributions
from importlib.metadata import distribution as distribution_of
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from waits import HUNG_SECONDS

from outrider import __version__
from outrider.ports import free_port

pytestmark = [pytest.mark.install]
ROOT = Path(__file__).parents[2]
# The roles that serve, by their extras.
SERVING = "target,draft,train,gateway"
# A client's whole installation, by the names of distributions.
LARGE = {"torch", "transformers", "triton", "numba", "numpy", "scipy", "opentelemetry-sdk", "prometheus-client"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source distribution of this checkout, and the wheel that is built from that."""
    folder = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT))
    return folder


@pytest.fixture(scope="module")
def client(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The programs of a clean environment with a client alone."""
    folder = tmp_path_factory.mktemp("client")
    venv.create(folder, with_pip=True)
    (wheel,) = built.glob("*.whl")
    _run(str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", str(wheel))
    yield folder / "bin"


def test_wheel_and_source_carry_the_version_and_no_tests(built: Path) -> None:
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert __version__ in wheel.name and __version__ in source.name
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops >= {"outrider", "outrider_client", "target_service", "draft_service", "tree_kernels"}
    assert not [name for name in names if "test" in name.rpartition("/")[2]]
    metadata = zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("METADATA"))).decode()
    # The owner has named none.
    assert "License" not in metadata.partition("\n\n")[0]


def test_a_client_is_small(client: Path) -> None:
    listed = _run(str(client / "pip"), "list", "--format", "freeze", "--disable-pip-version-check")
    installed = {line.partition("==")[0].lower() for line in listed.splitlines()}
    assert "grpcio" in installed and not installed & LARGE
    assert len(installed) < 25


def test_a_client_runs(client: Path) -> None:
    assert _run(str(client / "outrider"), "--version").strip() == f"outrider {__version__}"
    used = "import sys, outrider_client as c; c.Client, c.DraftClient; print(*[m for m in sys.modules if '.' not in m])"
    loaded = set(_run(str(client / "python"), "-c", used).split())
    assert "grpc" in loaded and not loaded & {"rich", "torch", "numpy"}
    unreachable = _try(client / "outrider", "health", "--target", "127.0.0.1:1")
    assert unreachable.returncode == 1
    assert "UNREACHABLE" in unreachable.stdout + unreachable.stderr


@pytest.mark.parametrize(
    ("command", "extra"), [("target", "target"), ("up", "target"), ("bench", "target"), ("demo", "all")]
)
def test_a_missing_role_is_named_with_what_brings_it(client: Path, command: str, extra: str) -> None:
    found = _try(client / "outrider", command)
    assert found.returncode == 1
    assert f"pip install 'outrider[{extra}]'" in found.stderr
    assert "Traceback" not in found.stderr


def test_a_command_line_without_rich_says_so(client: Path) -> None:
    without = "import sys; sys.modules['rich'] = None; from outrider_client.cli import main; sys.exit(main(['health']))"
    found = _try(client / "python", "-c", without)
    assert (found.returncode, found.stderr) == (
        1,
        "error: rich is not installed, which the command line needs: pip install rich\n",
    )


@pytest.fixture(scope="module")
def services(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a clean environment with what serves: target, draft, training and gateway. Of other packages it
    has those that the wheel requires, with what they require, as they are installed here."""
    folder = tmp_path_factory.mktemp("services")
    venv.create(folder)
    (wheel,) = built.glob("*.whl")
    (packages,) = folder.glob("lib/python*/site-packages")
    link_required(f"outrider[{SERVING}]", packages)
    # No index: it fails where a requirement is not there.
    pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check")
    _run(*pip, "install", "--quiet", "--no-index", f"{wheel}[{SERVING}]")
    return folder / "bin"


def link_required(requirement: str, packages: Path) -> None:
    """Link into `packages` what a requirement requires, without that itself, from this environment."""
    own = Path(sysconfig.get_path("purelib"))
    files = {canonicalize_name(each.name): _files_of(each) for each in distributions(path=[str(own)])}
    owners = Counter(first for paths in files.values() for first in {path.partition("/")[0] for path in paths})
    for name in required(requirement) - {"outrider", "pip"}:
        # Folders of one distribution as they are; namespaces file by file, without what others have there.
        firsts = {path: path.partition("/")[0] for path in files[name]}
        for path in {path if owners[first] > 1 else first for path, first in firsts.items()} - {".."}:
            if path.startswith("..") or (packages / path).exists():
                continue
            (packages / path).parent.mkdir(parents=True, exist_ok=True)
            (packages / path).symlink_to(own / path)


def _files_of(distribution: Distribution) -> list[str]:
    """As its record has them; `files` makes an object of each, of tens of thousands."""
    return [line.partition(",")[0] for line in (distribution.read_text("RECORD") or "").splitlines()]


def required(requirement: str) -> set[str]:
    """Names of the distributions that a requirement brings, its own among them."""
    found, waiting = set[tuple[str, str]](), [Requirement(requirement)]
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        for extra in {"", *one.extras}:
            if (name, extra) not in found:
                found.add((name, extra))
                others = map(Requirement, distribution_of(name).requires or ())
                waiting += [each for each in others if not each.marker or each.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


@pytest.mark.model
def test_each_role_serves_from_a_clean_environment(services: Path, tmp_path: Path) -> None:
    """Draft, target and gateway as a user starts them, and an answer through all three."""
    outrider, port = str(services / "outrider"), free_port()
    draft, target = f"unix:{tmp_path}/draft", f"unix:{tmp_path}/target"
    commands = [
        # Tries compile for twenty seconds where they are installed anew; they are imported below.
        [outrider, "draft", "--drafter", "prompt_lookup", "--listen", draft],
        [outrider, "target", "--draft", draft, "--draft-link-process", "own", "--listen", target],
        [outrider, "gateway", "--target", target, "--listen", f"127.0.0.1:{port}"],
    ]
    environment = {**os.environ, "PYTHONPATH": ""}
    with ExitStack() as ending:
        for command in commands:
            running = subprocess.Popen(command, env=environment, cwd="/")
            ending.callback(running.wait, HUNG_SECONDS)
            ending.callback(running.terminate)
        deadline = time.monotonic() + HUNG_SECONDS
        while not (tmp_path / "target").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        # It waits while the model is loaded.
        said = _run(outrider, "generate", "--target", target, "--max-tokens", "5", "Say hello.")
        assert said.strip()
        body = b'{"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 5}'
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        assert json.loads(_answer(request))["choices"][0]["message"]["content"]
    assert "usage:" in _run(outrider, "train-head", "--help")
    _run(str(services / "python"), "-c", "import draft_service.ngram.drafter, numba")


@pytest.mark.parametrize("module", ["target_service", "draft_service", "draft_service.training"])
def test_services_run_from_the_wheel(built: Path, tmp_path: Path, module: str) -> None:
    """With what this environment has of their requirements, and the wheel's own files."""
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    where = "import sys, importlib.util; print(importlib.util.find_spec(sys.argv[1]).origin)"
    origin = _run(sys.executable, "-c", where, module.partition(".")[0], path=str(tmp_path))
    assert origin.startswith(str(tmp_path))
    assert "usage:" in _run(sys.executable, "-m", module, "--help", path=str(tmp_path))


def _answer(request: urllib.request.Request) -> bytes:
    """Of a gateway that looks for its target from time to time."""
    deadline = time.monotonic() + HUNG_SECONDS
    while True:
        try:
            with urllib.request.urlopen(request, timeout=HUNG_SECONDS) as answer:
                found: bytes = answer.read()
                return found
        except urllib.error.HTTPError as error:
            assert error.code == 503 and time.monotonic() < deadline, error.read()
            time.sleep(0.5)


def _try(*command: str | Path, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command that finds modules in its environment and in `path`, and nowhere in this checkout."""
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd="/")


def _run(*command: str, path: str = "") -> str:
    """Standard output of a command that ends well."""
    done = _try(*command, path=path)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
