"""Read from the source what every module of gradcomp imports."""

import ast
import glob
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "gradcomp"


def modules_of(package: Path) -> list[Path]:
    """Return the package's Python files at every depth; Path.rglob would leave out kernels, a link."""
    return [Path(name) for name in glob.glob(str(package / "**" / "*.py"), recursive=True)]


def sources_of(package: Path) -> dict[str, str]:
    """Return dotted name -> source of the package's modules; an __init__'s name ends in `.__init__`."""
    names = {path: path.relative_to(package.parent).with_suffix("").parts for path in modules_of(package)}
    return {".".join(parts): path.read_text() for path, parts in names.items()}


def imported_names(source: str, module: str) -> set[str]:
    """Return the absolute names of all that this module imports when it runs, as `a.b` or `a.b.name`."""
    names = set()
    for node in ast.walk(_without_type_checking(ast.parse(source))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{origin}.{alias.name}" for alias in node.names}
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


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return module -> the modules among the sources that it imports."""
    graph = {}
    for module, source in sources.items():
        modules = {_module_of(name, sources) for name in imported_names(source, module)}
        graph[module] = {each for each in modules if each is not None and each != module}
    return graph


def _module_of(name: str, modules: Mapping[str, str]) -> str | None:
    """Return the module that an imported name is, or is defined in; None if it is none of these modules."""
    while name:
        for module in (name, f"{name}.__init__"):
            if module in modules:
                return module
        name = name.rpartition(".")[0]
    return None
