"""Check that the tree of docs/architecture.md names every module, and that modules' names differ."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.house.imports import PACKAGE, modules_of

PAGE = PACKAGE.parent / "docs" / "architecture.md"
# gradcomp/kernels, a link to kernels/, is among these.
MODULES = [path.relative_to(PACKAGE) for path in modules_of(PACKAGE)]


def names_in_tree(page: str) -> set[str]:
    """Return the names of modules, `name.py`, and of packages, `name/`, in the page's first code block."""
    return set(re.findall(r"\w+(?:\.py\b|/)", page.split("```")[1]))


def names_of(modules: Iterable[Path]) -> list[str]:
    """Return every module's file name; a package's __init__ stands for its folder."""
    names = [f"{path.parent.name}/" if path.stem == "__init__" else path.name for path in modules]
    return [name for name in names if name != "/"]


def differences(page: str, modules: Iterable[Path]) -> tuple[set[str], set[str]]:
    """Return the modules that the tree doesn't name, and the Python files in it that there are not."""
    tree, names = names_in_tree(page), set(names_of(modules))
    return names - tree, {name for name in tree - names if name.endswith(".py")}


def names_used_twice(modules: Iterable[Path]) -> list[str]:
    """Return the names of several modules or packages; those that every package may have don't count."""
    names = Counter(name.removesuffix("/").removesuffix(".py") for name in names_of(modules))
    return sorted(name for name, times in names.items() if times > 1 and name != "__main__")


def test_the_tree_names_every_module():
    assert differences(PAGE.read_text(), MODULES) == (set(), set())


def test_a_module_that_the_tree_does_not_name_is_found():
    page = "text\n```\na/\n  b.py  what it does; cd.py\n```\nand e.py"
    modules = [Path("__init__.py"), Path("a/__init__.py"), Path("a/b.py"), Path("a/d.py"), Path("e.py")]
    assert differences(page, modules) == ({"d.py", "e.py"}, {"cd.py"})
    assert differences("```\n```", [Path("a/__init__.py")]) == ({"a/"}, set())


def test_no_two_modules_have_the_same_name():
    assert names_used_twice(MODULES) == []
    paths = ["__main__.py", "a/__init__.py", "a/__main__.py", "a/errors.py", "b/__init__.py", "b/c/errors.py"]
    assert names_used_twice(map(Path, paths)) == ["errors"]
    assert names_used_twice(map(Path, ["a/ranks.py", "b/ranks/__init__.py"])) == ["ranks"]
