"""Rules of the source tree that no linter knows: who imports whom, what may not be called, sizes, docstrings."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from conftest import LONGEST

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "outrider": "protos/outrider",
    "tree_kernels": "kernels/tree_kernels",
    "tree_models": "kernels/tree_models",
    "target_service": "target_service",
    "draft_service": "draft_service",
    "outrider_client": "clients/outrider_client",
    "outrider_gateway": "clients/outrider_gateway",
    "outrider_ray": "clients/outrider_ray",
    "outrider_vllm": "clients/outrider_vllm",
}
# Which of our packages each may import, beside itself.
ALLOWED: dict[str, set[str]] = {
    "outrider": set(),
    "tree_kernels": set(),
    "tree_models": {"tree_kernels"},
    "target_service": {"outrider", "tree_kernels", "tree_models"},
    "draft_service": {"outrider", "tree_kernels", "tree_models"},
    "outrider_client": {"outrider"},
    "outrider_gateway": {"outrider", "outrider_client"},
    "outrider_ray": {"outrider", "outrider_client", "outrider_gateway"},
    "outrider_vllm": {"outrider", "outrider_client"},
}
# Where gRPC may be imported: servers and interceptors, links and calls, and what translates errors and credentials.
GRPC_EDGES = {
    "draft_service.frame_reader",
    "draft_service.server",
    "draft_service.service",
    "outrider.errors",
    "outrider.healthcheck",
    "outrider.telemetry.rpc",
    "outrider.serving.carried_calls",
    "outrider.serving.credentials",
    "outrider.serving.health",
    "outrider.serving.interceptors",
    "outrider.serving.pending",
    "outrider.serving.server",
    "outrider.wire.trees",
    "outrider_client.carrier",
    "outrider_client.connection",
    "outrider_client.demo.trace_sink",
    "outrider_client.failures",
    "outrider_client.generation",
    "outrider_client.verification",
    "outrider.drafting.link",
    "target_service.api.server",
    "target_service.openengine.services",
}
# Packages that services and clients work without, each with the modules outside that may load it: those of its command.
TOOLS: dict[str, set[str]] = {
    "draft_service.training": set(),
    "target_service.distillation": set(),
    "outrider_client.bench": {
        "outrider_client.cli.bench",
        "outrider_client.cli.tune",
        "outrider_client.demo",
        "outrider_client.tuning",
    },
    "outrider_client.tuning": {"outrider_client.cli.tune"},
    "outrider_client.demo": {"outrider_client.cli.demo"},
}
# What turns bytes into running code. Bytes from elsewhere are read by protobuf, JSON, TOML and safetensors.
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
FORBIDDEN_CALLS = {"torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "numpy.load", "np.load"}
FORBIDDEN_BUILTINS = {"eval", "exec", "compile", "__import__"}

# A file holds one idea, and one idea may need this much; cut at a smaller number, ideas were cut in two.
MAX_FILE_LINES = 500
# What reads from top to bottom on one screen.
MAX_FUNCTION_LINES = 60
# What one reads at a glance; the command line has a file for each command.
MAX_FOLDER_FILES = 14
# A compiled kernel is one unit: its arguments are arrays that only it names, one to a line.
MAX_KERNEL_LINES = 80
KERNEL_DECORATORS = ("compiled", "triton.jit")

# Names of methods that say nothing without their class. Each is kept for the families that give it one meaning.
VAGUE_METHODS = {
    # What a step committed, or arrived from the target: the frame of that name.
    "advance": r"\w*(Drafter|Link|LinkProcess|Drafts|Conversation|ProposeSession)",
    "begin": None,
    # Ends an object's use without arguments, as in Python's libraries; with them, the frame of that name.
    "close": r"\w*(Drafter|Link|LinkProcess|Drafts|Conversation|ProposeSession)",
    # Adds a value to a statistic.
    "observe": r"Histogram|Running\w+|PassTime|_Curve|_Undisturbed",
    # Attention is planned once per step, and run once per layer.
    "run": r"\w*Attention|_AttentionBackend|_Implementation",
    "take": None,
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file. `name` is its module's, and `package` the one it belongs to."""

    path: Path
    package: str
    name: str

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    def at(self, line: int, what: str) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}: {what}"

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    def imports(self) -> Iterator[tuple[str, int]]:
        """Every import of the file, also inside functions, and its line. Relative ones begin with a dot."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield "." * node.level + (node.module or ""), node.lineno

    @cached_property
    def imported_modules(self) -> set[str]:
        """Files of ours that this one loads, also inside functions. What only a type checker reads is left out: types
        of the dispatch beside a kernel's arguments load nothing."""
        found: set[str] = set()
        checked = [node for node in self.tree.body if isinstance(node, ast.If) and _is_type_checking(node)]
        left_out = {id(inner) for node in checked for inner in ast.walk(node)}
        for node in self.nodes:
            if id(node) in left_out:
                continue
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names if alias.name in NAMES)
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= inner & NAMES
                if node.module in NAMES and not inner <= NAMES:
                    found.add(node.module)
        return found

    def uses_grpc(self) -> bool:
        return any(name.partition(".")[0] == "grpc" for name, _ in self.imports())


def _is_type_checking(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _modules(packages: Mapping[str, str]) -> list[Source]:
    found = []
    for package, folder in packages.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "_pb2" not in path.name:
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                found.append(Source(path, package, ".".join([package, *(p for p in parts if p != "__init__")])))
    return found


MODULES = _modules(PACKAGES)
SCRIPTS = _modules({"benchmarks": "benchmarks"})
NAMES = {module.name for module in MODULES + SCRIPTS}
FOLDERS = {module.name for module in MODULES + SCRIPTS if module.path.name == "__init__.py"}


def test_every_package_is_found() -> None:
    assert {module.package for module in MODULES} == set(PACKAGES)


def test_imports_follow_the_arrows() -> None:
    wrong = []
    for module in MODULES:
        foreign = set(PACKAGES) - ALLOWED[module.package] - {module.package}
        for name, line in module.imports():
            if name.startswith(".") or name.partition(".")[0] in foreign:
                wrong.append(module.at(line, f"imports {name}"))
    assert wrong == []


def test_folders_have_no_circles() -> None:
    """A folder's files may import another folder's, or the other way round, and not both, however far around."""
    arrows: dict[str, set[str]] = defaultdict(set)
    for module in MODULES + SCRIPTS:
        for name in module.imported_modules:
            if _room(name) != _room(module.name):
                arrows[_room(module.name)].add(_room(name))
    assert _circle(arrows) is None


def test_files_have_no_circles() -> None:
    arrows = {module.name: module.imported_modules - {module.name} for module in MODULES + SCRIPTS}
    assert _circle(arrows) is None


def test_folders_are_small() -> None:
    """Nobody finds a file among many."""
    counts = Counter(_room(module.name) for module in MODULES + SCRIPTS if module.path.stem[0] != "_")
    assert {room: count for room, count in counts.items() if count > MAX_FOLDER_FILES} == {}


def _room(module: str) -> str:
    """The folder that a module is in; a package's top level is no folder, each of its files stands for itself."""
    folder = module if module in FOLDERS else module.rpartition(".")[0]
    return folder if "." in folder else module


def _circle(arrows: Mapping[str, set[str]]) -> list[str] | None:
    """Names that lead back to the first of them, if any do."""
    try:
        tuple(TopologicalSorter(arrows).static_order())
    except CycleError as error:
        return list(error.args[1])
    return None


def test_grpc_stays_at_the_edges() -> None:
    assert {module.name for module in MODULES if module.uses_grpc()} == GRPC_EDGES


def test_tools_are_loaded_by_their_commands_alone() -> None:
    """Training, distillation, benchmarks, tuning and the demo: no service and no client carries them."""
    loading = {
        (module.name, tool)
        for module in MODULES
        for tool in TOOLS
        if any(f"{name}.".startswith(f"{tool}.") for name in module.imported_modules)
        and not f"{module.name}.".startswith(f"{tool}.")
        and not {module.name, _room(module.name)} & TOOLS[tool]
    }
    assert loading == set()
    assert set(TOOLS) <= FOLDERS


def test_descriptions_and_layers_do_not_know_transformers() -> None:
    """Only the oracle does."""
    importing = {
        module.name
        for module in MODULES
        if module.package in ("tree_kernels", "tree_models")
        and any(name.partition(".")[0] == "transformers" for name, _ in module.imports())
    }
    assert importing == {"tree_models.reference"}


def test_nothing_runs_what_it_reads() -> None:
    wrong = []
    for source in MODULES + SCRIPTS:
        for name, line in source.imports():
            if name.partition(".")[0] in FORBIDDEN_MODULES:
                wrong.append(source.at(line, f"imports {name}"))
        for node in source.nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_BUILTINS | FORBIDDEN_CALLS:
                wrong.append(source.at(node.lineno, f"calls {ast.unparse(node.func)}"))
    assert wrong == []


def test_files_are_short() -> None:
    lengths = {source.at(1, "lines"): len(source.text.splitlines()) for source in MODULES + SCRIPTS}
    assert {where: length for where, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    wrong = []
    for source in MODULES + SCRIPTS:
        for node in source.nodes:
            if not isinstance(node, Function):
                continue
            compiled = any(ast.unparse(decorator).startswith(KERNEL_DECORATORS) for decorator in node.decorator_list)
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > (MAX_KERNEL_LINES if compiled else MAX_FUNCTION_LINES):
                wrong.append(source.at(node.lineno, f"{node.name} has {length} lines"))
    assert wrong == []


def test_no_class_name_is_used_twice() -> None:
    """What a search for a class finds is that class."""
    sources = MODULES + SCRIPTS
    names = Counter(node.name for source in sources for node in source.nodes if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == set()


def test_methods_say_what_they_do() -> None:
    """A method's name is read where it is called, without its class."""
    wrong = []
    for source in MODULES:
        for owner in source.nodes:
            if not isinstance(owner, ast.ClassDef):
                continue
            for node in owner.body:
                if not isinstance(node, Function) or node.name not in VAGUE_METHODS:
                    continue
                family = VAGUE_METHODS[node.name]
                ends = node.name == "close" and len(node.args.args) == 1
                if not ends and (family is None or not re.fullmatch(family, owner.name)):
                    wrong.append(source.at(node.lineno, f"{owner.name}.{node.name}"))
    assert wrong == []


def test_modules_say_what_they_are() -> None:
    missing = [
        source.at(1, "no docstring")
        for source in MODULES + SCRIPTS
        if source.text.strip() and not ast.get_docstring(source.tree)
    ]
    assert missing == []


def test_nothing_swallows_every_error() -> None:
    """A handler of every exception raises again, or says on its line or the one above why it must not."""
    wrong = []
    for source in MODULES + SCRIPTS:
        lines = ["", *source.text.splitlines()]
        for node in source.nodes:
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            reasoned = any("# " in line for line in lines[node.lineno - 1 : node.lineno + 2])
            if broad and not raises and not reasoned:
                wrong.append(source.at(node.lineno, "catches everything"))
    assert wrong == []


def _says_itself(node: Function | ast.ClassDef) -> bool:
    """Entry points and conversions, whose names are what there is to say."""
    return node.name in ("main", "to_pb", "from_pb") or node.name.endswith(("_to_pb", "_from_pb"))


def _named_in_a_table(source: Source, node: ast.stmt) -> bool:
    """Errors are described in the table at the head of their file."""
    head = ast.get_docstring(source.tree) or ""
    return isinstance(node, ast.ClassDef) and bool(node.bases) and f" {node.name} " in head


def test_public_functions_and_classes_are_documented() -> None:
    missing = []
    for source in MODULES:
        for node in source.tree.body:
            if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
                continue
            if not (ast.get_docstring(node) or _says_itself(node) or _named_in_a_table(source, node)):
                missing.append(source.at(node.lineno, node.name))
    assert missing == []


def test_methods_of_the_client_are_documented() -> None:
    """Every public method of what `outrider_client` offers."""
    door = next(module for module in MODULES if module.name == "outrider_client")
    offered = next(
        ast.literal_eval(node.value)
        for node in door.tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    missing = [
        module.at(node.lineno, f"{owner.name}.{node.name}")
        for module in MODULES
        if module.package == "outrider_client"
        for owner in module.tree.body
        if isinstance(owner, ast.ClassDef) and owner.name in offered
        for node in owner.body
        if isinstance(node, Function) and not node.name.startswith("_")
        if not ast.get_docstring(node) and not _says_itself(node)
    ]
    assert missing == []


def test_test_files_that_begin_first_are_there() -> None:
    assert len(set(LONGEST)) == len(LONGEST)
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []
