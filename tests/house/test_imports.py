"""Check that imports follow the arrows of docs/architecture.md, and that they form no circle."""

import ast
import re
import sys
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

from tests.house.imports import PACKAGE, import_graph, imported_names, sources_of

PAGE = PACKAGE.parent / "docs" / "architecture.md"
SOURCES = sources_of(PACKAGE)
# Packages below those on the page that import nothing of gradcomp but themselves.
SELF_CONTAINED = {"gradcomp.testing.ranks"}
MAY_USE_DISTRIBUTED = {
    *("__main__", "bench", "comm", "compress", "frameworks", "fsdp", "hooks", "local_steps", "parallel"),
    "reducer",
    "testing",
}


def drawn_arrows(page: str) -> dict[str, set[str]]:
    """Return the page's arrows, `name ──▶ name, name`, as package -> packages it may import."""
    lines = re.findall(r"^(\w+) +──▶ (.+)$", page, re.MULTILINE)
    return {package: set(targets.split(", ")) for package, targets in lines}


ARROWS = drawn_arrows(PAGE.read_text())


def package_of(module: str) -> str:
    """Return the package or module directly below gradcomp that holds a module."""
    return [*module.split("."), "__init__"][1]


PACKAGES = {package_of(module) for module in SOURCES}


def crossings(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return package -> other packages that it imports."""
    found: dict[str, set[str]] = {}
    for module, targets in import_graph(sources).items():
        package = package_of(module)
        found.setdefault(package, set()).update({package_of(each) for each in targets} - {package})
    return {package: targets for package, targets in found.items() if targets}


def violations(module: str, source: str, arrows: Mapping[str, set[str]] = ARROWS) -> list[str]:
    """Return the errors in the module's imports."""
    package, found = package_of(module), []
    for name in sorted(imported_names(source, module)):
        parts = name.split(".")
        if parts[0] == "gradcomp":
            target = package_of(name) if package_of(name) in PACKAGES else "__init__"
            if target not in arrows.get(package, set()) | {package}:
                found.append(f"{package} imports {name}")
        if parts[:2] == ["torch", "distributed"] and package not in MAY_USE_DISTRIBUTED:
            found.append(f"{package} uses {name}")
        if package == "kernels" and parts[0] not in {"gradcomp", "torch", "triton", *sys.stdlib_module_names}:
            found.append(f"{package} imports {name}")
    return found + intrusions(module, source)


def intrusions(module: str, source: str) -> list[str]:
    """Return the imports from the rest of gradcomp in a module of a self-contained package."""
    return [
        f"{folder} imports {name}"
        for folder in SELF_CONTAINED
        if module.startswith(f"{folder}.")
        for name in sorted(imported_names(source, module))
        if f"{name}.".startswith("gradcomp.") and not f"{name}.".startswith(f"{folder}.")
    ]


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return modules in a circle, where each imports the one before it; none if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_the_arrows_are_the_imports():
    """A wrong import fails, and so does an arrow that no import needs, or a package without any arrow."""
    assert [each for module, source in SOURCES.items() for each in violations(module, source)] == []
    assert crossings(SOURCES) == ARROWS
    assert set(ARROWS).union(*ARROWS.values()) == PACKAGES


def test_no_circles():
    assert circle(ARROWS) == []
    assert circle(import_graph(SOURCES)) == []


def test_arrows_are_read():
    assert drawn_arrows("a  ──▶ b\n\nbc ──▶ d, e") == {"a": {"b"}, "bc": {"d", "e"}}
    assert len(ARROWS) > 5


def test_a_wrong_import_is_found():
    for module, source, message in [
        ("kernels.flatten", "from gradcomp.ops import flatten", "kernels imports gradcomp.ops.flatten"),
        ("kernels.flatten", "from ..layout import FlatLayout", "kernels imports gradcomp.layout.FlatLayout"),
        ("kernels.flatten", "import numpy", "kernels imports numpy"),
        ("ops", "from . import hooks", "ops imports gradcomp.hooks"),
        ("ops", "import gradcomp", "ops imports gradcomp"),
        ("ops", "from gradcomp import __version__", "ops imports gradcomp.__version__"),
        ("ops", "import torch\ntorch.distributed.barrier()", "ops uses torch.distributed"),
        ("cpu.__init__", "import torch.distributed as dist", "cpu uses torch.distributed"),
        ("layout.flat", "def f():\n    from ..cpu import cast", "layout imports gradcomp.cpu.cast"),
        ("layout.__init__", "from ..cpu import cast", "layout imports gradcomp.cpu.cast"),
    ]:
        assert violations(f"gradcomp.{module}", source) == [message]
    assert violations("gradcomp.ops", "if TYPE_CHECKING:\n    from .layout import FlatLayout") == []


def test_an_intrusion_is_found():
    package = "gradcomp.testing.ranks"
    for source, found in [
        ("from gradcomp.testing.ranks import c10d", []),
        ("from . import c10d", []),
        ("import gradcomp", ["gradcomp"]),
        ("from ..run import Run", ["gradcomp.testing.run.Run"]),
        ("import gradcomp.testing.ranks_of_ours", ["gradcomp.testing.ranks_of_ours"]),
    ]:
        expected = [f"{package} imports {name}" for name in found]
        assert intrusions(f"{package}.collectives", source) == expected
        assert intrusions("gradcomp.testing.check", source) == []


def defines_hooks(source: str) -> bool:
    """Return whether a function of the module takes a bucket, as hooks do."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return any(argument.arg == "bucket" for each in functions for argument in each.args.args)


def test_annotations_of_hooks_are_types():
    """DDP compares a hook's annotations with types; `from __future__ import annotations` makes them text."""
    hooks = {module: source for module, source in SOURCES.items() if defines_hooks(source)}
    assert {"gradcomp.hooks.default_hooks", "gradcomp.compress.state"} <= set(hooks)
    names = {module: imported_names(source, module) for module, source in hooks.items()}
    assert [module for module, imports in names.items() if "__future__.annotations" in imports] == []


def test_a_circle_is_found():
    sources = {
        "gradcomp.hooks.a": "from gradcomp.hooks import b",
        "gradcomp.hooks.b": "def f():\n    from .c import name",
        "gradcomp.hooks.c": "import gradcomp.hooks.a",
    }
    assert sorted(set(circle(import_graph(sources)))) == sorted(sources)
    assert circle(import_graph(sources | {"gradcomp.hooks.c": ""})) == []
    assert circle({"a": {"b"}, "b": {"a"}}) != []


def test_an_arrow_without_an_import_is_found():
    sources = {"gradcomp.hooks.a": "from gradcomp.compress import b", "gradcomp.compress.b": ""}
    assert crossings(sources) == {"hooks": {"compress"}}
