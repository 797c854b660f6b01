"""The two laws: who may import whom, and where input and output may happen."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = "calculet_core"
PRODUCTS = ("calculet_worker", "calculet_router", "calculet_supervisor", "calculet_perf")
IO_ROOMS = ("shell", "device", "commands")
IO_FILES = ("cli.py", "__main__.py")
PURE_IN_DEVICE = tuple(f"calculet_worker/device/{name}.py" for name in ("base", "sim_board", "sim_chip", "sim_graph", "sim_rule"))
IO_MODULES = {
    "asyncio", "concurrent", "fcntl", "http", "httptools", "io", "logging", "mmap", "multiprocessing", "os", "pathlib", "psutil",
    "select", "selectors", "shutil", "signal", "socket", "socketserver", "sqlite3", "ssl", "subprocess", "tempfile", "threading",
    "time", "urllib", "uvloop", "zmq",
}  # fmt: skip
IO_BUILTINS = {"open", "input", "print", "breakpoint"}


def python_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def is_io_room(path: Path) -> bool:
    relative = path.relative_to(ROOT)
    if relative.as_posix() in PURE_IN_DEVICE:
        return False
    return bool(set(relative.parts[1:-1]) & set(IO_ROOMS)) or relative.name in IO_FILES


def type_checking_nodes(tree: ast.AST) -> set[ast.AST]:
    """Everything under `if TYPE_CHECKING:`: it is never executed."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            found.update(child for statement in node.body for child in ast.walk(statement))
    return found


def imports(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, absolute module name), with `from a.b import c` as both a.b and a.b.c."""
    ignored, found = type_checking_nodes(tree), []
    for node in ast.walk(tree):
        if node in ignored:
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found += [(node.lineno, node.module)] + [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def first_law_violations(path: Path, tree: ast.AST) -> list[str]:
    package = path.relative_to(ROOT).parts[0]
    forbidden = [other for other in PRODUCTS if other != package]
    return [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for line, module in imports(tree)
        if module.split(".")[0] in forbidden
    ]


def second_law_violations(path: Path, tree: ast.AST) -> list[str]:
    where, broken = path.relative_to(ROOT), []
    for line, module in imports(tree):
        parts = module.split(".")
        if parts[0] in IO_MODULES:
            broken.append(f"{where}:{line} imports {module}")
        if parts[0] in (CORE, *PRODUCTS) and set(parts[1:]) & set(IO_ROOMS):
            target = "/".join(parts) + ".py"
            allowed = any(target == pure or target.startswith(pure.removesuffix(".py") + "/") for pure in PURE_IN_DEVICE)
            if not allowed and module != "calculet_worker.device":
                broken.append(f"{where}:{line} imports the IO room {module}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IO_BUILTINS:
            broken.append(f"{where}:{node.lineno} calls {node.func.id}()")
        is_random = isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("random", "np.random", "numpy.random")
        if is_random and node.attr not in ("Random", "Generator", "default_rng"):
            broken.append(f"{where}:{node.lineno} uses random.{node.attr}: inject a seeded generator")
    return broken


@pytest.mark.parametrize("package", (CORE, *PRODUCTS))
def test_first_law_products_never_import_each_other(package: str) -> None:
    files = python_files(package)
    assert files, f"{package} has no files: the law would hold of nothing"
    broken = [violation for path in files for violation in first_law_violations(path, ast.parse(path.read_text()))]
    assert not broken, "\n".join(broken)


def test_first_law_core_imports_no_product() -> None:
    broken = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in python_files(CORE)
        for line, module in imports(ast.parse(path.read_text()))
        if module.split(".")[0] in PRODUCTS
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("package", (CORE, *PRODUCTS))
def test_second_law_only_io_rooms_do_input_and_output(package: str) -> None:
    pure = [path for path in python_files(package) if not is_io_room(path)]
    broken = [violation for path in pure for violation in second_law_violations(path, ast.parse(path.read_text()))]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio", "import time", "from os import path", "import zmq", "open('x')", "import random\nrandom.random()",
        "from calculet_core.shell.files import write_atomic", "from calculet_worker.device.sim import SimDevice",
    ],
)  # fmt: skip
def test_the_second_law_catches(source: str) -> None:
    assert second_law_violations(ROOT / "calculet_worker" / "engine.py", ast.parse(source))


def test_the_first_law_catches_a_worker_that_imports_the_router() -> None:
    tree = ast.parse("from calculet_router import openai")
    assert first_law_violations(ROOT / "calculet_worker" / "engine.py", tree)


def test_top_level_holds_what_was_agreed_and_nothing_else() -> None:
    agreed = {
        "pyproject.toml", "Makefile", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "calculet_core", "calculet_worker",
        "calculet_router", "calculet_supervisor", "calculet_perf", "tests", "systemd", "configs", "docs",
    }  # fmt: skip
    generated = {"build", "dist", "calculet.egg-info"}
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")} - generated
    assert found - agreed == set(), "needs a decision record and a line here"
    assert agreed - found == set()
