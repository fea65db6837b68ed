"""Imports point one way (docs/architecture.md), and importing gradcomp changes nothing outside of it."""

import ast
import glob
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "gradcomp"

# Which rooms a room may import. The kernels know torch and Triton, and nobody here.
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": {"hooks", "parallel", "reducer"},
    "__main__": {"__version__", "ops"},
    "kernels": set(),
    "layout": set(),
    "cpu": set(),
    "ops": {"kernels", "cpu"},
    "compress": {"ops", "layout"},
    "hooks": {"compress", "ops", "layout"},
    "reducer": {"compress", "ops", "layout", "hooks"},
    "parallel": {"compress", "reducer", "hooks"},
    "testing": {"compress", "hooks", "layout", "reducer"},
}
# Folders below a room that import nothing of ours but themselves.
SELF_CONTAINED = {"gradcomp.testing.ranks"}
MAY_USE_DISTRIBUTED = {"__main__", "compress", "hooks", "parallel", "reducer", "testing"}


def modules_of(package: Path) -> list[Path]:
    """Its Python files at every depth. Path.rglob would leave out kernels, a symbolic link."""
    return [Path(name) for name in glob.glob(str(package / "**" / "*.py"), recursive=True)]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_modules(source: str, package: str) -> set[str]:
    """Absolute names of all that a module of this package imports when it runs, as `a.b` or `a.b.name`."""
    names = set()
    for node in ast.walk(_without_type_checking(ast.parse(source))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed"):
            names.add("torch.distributed")
    return names


def _without_type_checking(tree: ast.Module) -> ast.Module:
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return tree


def violations(room: str, modules: set[str]) -> list[str]:
    found = []
    for module in sorted(modules):
        parts = module.split(".")
        if parts[0] == "gradcomp" and len(parts) > 1 and parts[1] not in MAY_IMPORT[room] | {room}:
            found.append(f"{room} imports {module}")
        if parts[:2] == ["torch", "distributed"] and room not in MAY_USE_DISTRIBUTED:
            found.append(f"{room} uses {module}")
        if room == "kernels" and parts[0] not in {"gradcomp", "torch", "triton", *sys.stdlib_module_names}:
            found.append(f"{room} imports {module}")
    return found


def intrusions(package: str, modules: set[str]) -> list[str]:
    """What a self-contained package, or one within it, imports from the rest of gradcomp."""
    return [
        f"{package} imports {module}"
        for folder in SELF_CONTAINED
        if f"{package}.".startswith(f"{folder}.")
        for module in sorted(modules)
        if f"{module}.".startswith("gradcomp.") and not f"{module}.".startswith(f"{folder}.")
    ]


def names_used_twice(modules: Iterable[Path]) -> list[str]:
    """The names of several modules or packages; those that every package may have don't count."""
    names = [path.parent.name if path.stem == "__init__" else path.stem for path in modules]
    return sorted(name for name, times in Counter(names).items() if times > 1 and name != "__main__")


def test_imports_point_one_way():
    modules = modules_of(PACKAGE)
    assert {room_of(path) for path in modules} == set(MAY_IMPORT), "a room without a rule, or the reverse"
    found = []
    for path in modules:
        package = ".".join(["gradcomp", *path.relative_to(PACKAGE).parts[:-1]])
        imported = imported_modules(path.read_text(), package)
        found += violations(room_of(path), imported) + intrusions(package, imported)
    assert found == []


def test_every_depth_is_looked_at():
    found = {path.relative_to(PACKAGE).as_posix() for path in modules_of(PACKAGE)}
    assert found >= {"ops.py", "hooks/__init__.py", "kernels/flatten.py", "testing/ranks/scheduler.py"}


def test_no_two_modules_have_the_same_name():
    assert names_used_twice(modules_of(PACKAGE)) == []
    paths = ["__main__.py", "a/__init__.py", "a/__main__.py", "a/errors.py", "b/__init__.py", "b/c/errors.py"]
    assert names_used_twice(map(Path, paths)) == ["errors"]
    assert names_used_twice(map(Path, ["a/ranks.py", "b/ranks/__init__.py"])) == ["ranks"]


def test_a_wrong_import_is_found():
    for room, source, message in [
        ("kernels", "from gradcomp.ops import flatten", "kernels imports gradcomp.ops.flatten"),
        ("kernels", "from ..layout import FlatLayout", "kernels imports gradcomp.layout.FlatLayout"),
        ("kernels", "import numpy", "kernels imports numpy"),
        ("ops", "from . import hooks", "ops imports gradcomp.hooks"),
        ("ops", "import torch\ntorch.distributed.barrier()", "ops uses torch.distributed"),
        ("cpu", "import torch.distributed as dist", "cpu uses torch.distributed"),
        ("layout", "def f():\n    from .cpu import cast", "layout imports gradcomp.cpu.cast"),
    ]:
        package = "gradcomp.kernels" if room == "kernels" else "gradcomp"
        assert violations(room, imported_modules(source, package)) == [message]
    for source, found in [
        ("from gradcomp.testing.ranks import c10d", []),
        ("from . import c10d", []),
        ("import gradcomp", ["gradcomp"]),
        ("from ..run import Run", ["gradcomp.testing.run.Run"]),
        ("import gradcomp.testing.ranks_of_ours", ["gradcomp.testing.ranks_of_ours"]),
    ]:
        package = "gradcomp.testing.ranks"
        expected = [f"{package} imports {module}" for module in found]
        assert intrusions(package, imported_modules(source, package)) == expected
        assert intrusions("gradcomp.testing", imported_modules(source, package)) == []
    for_types_only = "if TYPE_CHECKING:\n    from .layout import FlatLayout"
    assert violations("ops", imported_modules(for_types_only, "gradcomp")) == []


PROBE = """
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
before = dict(c10d._world.pg_map), c10d._world.default_pg, dist.is_initialized()
random_state = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
{imports}
now = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
unchanged = {{
    "initialised CUDA": not torch.cuda.is_initialized(),
    "process groups": (dict(c10d._world.pg_map), c10d._world.default_pg, dist.is_initialized()) == before,
    "torch's settings": torch.equal(now[0], random_state[0]) and now[1:] == random_state[1:],
    "test packages": "hypothesis" not in sys.modules and "pytest" not in sys.modules,
}}
print(*(name for name, holds in unchanged.items() if not holds), sep="\\n", end="")
"""


def probe(imports: str) -> list[str]:
    """What a fresh process finds that these imports have changed; a warning is an error."""
    code = "import sys\nimport torch\n" + PROBE.format(imports=imports)
    command = [sys.executable, "-W", "error", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=PACKAGE.parent)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_importing_has_no_side_effects():
    assert probe("import gradcomp, gradcomp.ops, gradcomp.hooks.default_hooks") == []


def test_side_effects_are_found():
    everything = """
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.cuda.is_initialized = lambda: True
torch.rand(1)
import hypothesis
"""
    assert probe(everything) == ["initialised CUDA", "process groups", "torch's settings", "test packages"]
