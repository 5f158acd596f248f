"""The SDKs' sources: generated code is what the contract gives, versions are pinned, and the examples run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from sdk.toolchains import GO_MODULE

from outrider import __version__
from outrider.v1 import target_pb2 as pb

pytestmark = [pytest.mark.sdk]

CLIENTS = Path(__file__).parents[2] / "clients"


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder, by its path."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_generated_code_is_current(toolchain: Any, tmp_path: Path) -> None:
    shutil.copy(toolchain.folder / "buf.gen.yaml", tmp_path)
    toolchain.run(*toolchain.generate, folder=tmp_path)
    generated = contents(tmp_path / toolchain.generated)
    assert generated
    assert contents(toolchain.folder / toolchain.generated) == generated


def test_npm_versions_are_pinned() -> None:
    package = json.loads((CLIENTS / "typescript" / "package.json").read_text())
    versions = package["dependencies"] | package["devDependencies"]
    assert [name for name, version in versions.items() if not re.fullmatch(r"\d+\.\d+\.\d+", version)] == []
    lock = json.loads((CLIENTS / "typescript" / "package-lock.json").read_text())
    installed = {name: entry for name, entry in lock["packages"].items() if name}
    assert [name for name, entry in installed.items() if "integrity" not in entry] == []
    # Addresses would tie installs to the registry that wrote the file.
    assert [name for name, entry in installed.items() if "resolved" in entry] == []


def test_npm_names_no_licence() -> None:
    package = json.loads((CLIENTS / "typescript" / "package.json").read_text())
    lock = json.loads((CLIENTS / "typescript" / "package-lock.json").read_text())
    assert "license" not in package | lock["packages"][""]


def test_go_sum_covers_go_mod() -> None:
    required = re.findall(r"^\t(\S+) (v\S+)", (CLIENTS / "go" / "go.mod").read_text(), re.MULTILINE)
    sums = re.findall(r"^(\S+) (\S+) h1:[A-Za-z0-9+/]{43}=$", (CLIENTS / "go" / "go.sum").read_text(), re.MULTILINE)
    assert len(required) > 5
    for path, version in required:
        assert (path, version) in sums
        assert (path, f"{version}/go.mod") in sums


def test_versions_agree() -> None:
    npm = json.loads((CLIENTS / "typescript" / "package.json").read_text())["version"]
    go = re.search(r'^const Version = "(.+)"$', (CLIENTS / "go" / "connection.go").read_text(), re.MULTILINE)
    assert go
    assert npm == go[1] == __version__


@pytest.mark.parametrize("path", ["", "outrider/clients/go", "https://example.com/outrider", "example.com"])
def test_module_path_must_be_fetchable(path: str) -> None:
    manifest = CLIENTS / "go" / "go.mod"
    before = manifest.read_text()
    done = subprocess.run([CLIENTS / "go" / "set_module.sh", path], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "go get can fetch" in done.stderr
    assert manifest.read_text() == before


def test_npm_package_holds_code_and_types_only(toolchain: Any) -> None:
    if toolchain.language != "typescript":
        pytest.skip("npm packs TypeScript")
    [archive] = toolchain.consumer.parent.glob("*.tgz")
    with tarfile.open(archive) as packed:
        names = {name.removeprefix("package/") for name in packed.getnames()}
    code = {name for name in names if name.endswith(".js")}
    types = {name for name in names if name.endswith(".d.ts")}
    assert {name.removesuffix(".js") for name in code} == {name.removesuffix(".d.ts") for name in types}
    assert names - code - types == {"package.json", "README.md"}
    assert {str(Path(name).parent) for name in code} == {
        "dist/src",
        "dist/src/gen/google/rpc",
        "dist/src/gen/outrider/v1",
    }
    package = json.loads((toolchain.folder / "package.json").read_text())
    entry = package["exports"]["."]
    assert {entry["types"], entry["default"]} <= {f"./{name}" for name in names}
    assert archive.name == f"{package['name']}-{package['version']}.tgz"


def test_programs_of_the_readme_compile(toolchain: Any) -> None:
    """As a project that installed the package compiles them."""
    mark = {"typescript": "ts", "go": "go"}[toolchain.language]
    readme = (toolchain.folder / "README.md").read_text()
    programs = re.findall(rf"^```{mark}\n(.+?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert len(programs) == 2
    for number, program in enumerate(programs):
        folder = toolchain.consumer / f"program{number}"
        folder.mkdir(exist_ok=True)
        (folder / f"main.{mark}").write_text(program.replace('"outrider/clients/go', f'"{GO_MODULE}'))
    if toolchain.language == "go":
        toolchain.run("go", "vet", "./...", folder=toolchain.consumer)
    else:
        settings = {"module": "NodeNext", "target": "ES2022", "strict": True, "noEmit": True, "types": ["node"]}
        settings["typeRoots"] = [str(toolchain.folder / "node_modules" / "@types")]
        (toolchain.consumer / "tsconfig.json").write_text(json.dumps({"compilerOptions": settings}))
        toolchain.run("tsc", "--project", ".", folder=toolchain.consumer)


def test_a_program_of_ones_own_runs_from_a_checkout(toolchain: Any, tmp_path: Path) -> None:
    """In an empty folder, with the commands that the README gives; nobody listens, and the program says so."""
    readme = (toolchain.folder / "README.md").read_text()
    mark = {"typescript": "ts", "go": "go"}[toolchain.language]
    [program, _] = re.findall(rf"^```{mark}\n(.+?)^```$", readme, re.MULTILINE | re.DOTALL)
    program = program.replace("127.0.0.1:50051", "127.0.0.1:1")
    if toolchain.language == "go":
        (tmp_path / "main.go").write_text(program)
        [commands] = [block for block in re.findall(r"^```sh\n(.+?)^```$", readme, re.M | re.S) if "go run" in block]
        run = commands.replace("PATH/outrider", str(CLIENTS.parent))
    else:
        assert "`node chat.mjs`" in readme
        (tmp_path / "chat.mjs").write_text(program)
        [archive] = toolchain.consumer.parent.glob("*.tgz")
        run = f"npm install --ignore-scripts {archive} && node chat.mjs"
    done = subprocess.run(
        ["sh", "-ec", run], cwd=tmp_path, env=toolchain.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "cannot reach 127.0.0.1:1: " in done.stderr


@pytest.mark.asyncio(loop_scope="session")
async def test_example_prints_the_answer(sdk: Any) -> None:
    question = pb.ChatMessage(role="user", content="Why is the sky blue?")
    answer = await sdk.run("generate", pb.GenerateRequest(chat=pb.ChatInput(messages=[question])))
    assert answer["text"]
    status, out, err = await sdk.run_example("chat", sdk.services.target, question.content)
    assert (status, out, err) == (0, answer["text"] + "\n", "")
