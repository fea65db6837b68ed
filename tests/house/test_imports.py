"""Imports point one way (docs/house.md), and importing gradcomp changes nothing outside of it."""

import ast
import subprocess
import sys
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
    "testing": {"compress", "hooks", "reducer"},
}
MAY_USE_DISTRIBUTED = {"__main__", "compress", "hooks", "parallel", "reducer", "testing"}


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


def test_imports_point_one_way():
    modules = [*PACKAGE.glob("*.py"), *PACKAGE.glob("*/*.py")]
    assert {room_of(path) for path in modules} == set(MAY_IMPORT), "a room without a rule, or the reverse"
    found = []
    for path in modules:
        package = ".".join(["gradcomp", *path.relative_to(PACKAGE).parts[:-1]])
        found += violations(room_of(path), imported_modules(path.read_text(), package))
    assert found == []


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
