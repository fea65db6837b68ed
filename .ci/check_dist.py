"""Install what `make dist` has built with several Pythons: python .ci/check_dist.py --help

Wheel and sdist are each installed in a virtual environment of their own, without dependencies. pip builds
the sdist in isolation, with setuptools from the package index. torch is not there, so nothing is imported:
modules are compiled, and the metadata's version is compared with the file's name.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

# What runs in the environment, with -I so that no checkout is found: it prints the version and the number of
# modules, and fails on one that doesn't compile.
INSPECT = """
import compileall, pathlib, warnings
from importlib import metadata
warnings.simplefilter("error")
found = metadata.distribution("gradcomp")
folder = pathlib.Path(found.locate_file("gradcomp"))
assert compileall.compile_dir(str(folder), quiet=1, force=True), "modules that don't compile"
assert not (folder / "kernels").is_symlink() and (folder / "kernels" / "flatten.py").is_file(), "no kernels"
assert (folder / "py.typed").is_file(), "no py.typed"
print(found.version, len(list(folder.rglob("*.py"))))
"""


def output_of(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def version_of(python: str) -> str | None:
    """Return the Python's version, or None if there is none of this name."""
    try:
        return output_of(python, "-c", "import platform; print(platform.python_version())")
    except (OSError, RuntimeError):
        return None


def check(python: str, distribution: Path, expected: str) -> int:
    """Install the distribution in an environment of its own; return the number of modules that it has."""
    with tempfile.TemporaryDirectory() as folder:
        output_of(python, "-m", "venv", folder)
        installed = Path(folder) / "bin" / "python"
        options = ["-q", "--disable-pip-version-check", "--no-deps"]
        output_of(installed, "-m", "pip", "install", *options, distribution)
        version, num_modules = output_of(installed, "-I", "-c", INSPECT).split()
        if version != expected:
            raise RuntimeError(f"{distribution.name} has version {version}, expected {expected}")
        return int(num_modules)


def main() -> None:
    parser = argparse.ArgumentParser(description="Install the built wheel and sdist with several Pythons.")
    parser.add_argument("folder", type=Path, help="where the wheel and the sdist are")
    parser.add_argument("pythons", nargs="+", help="Pythons, by name or path; those not there are skipped")
    options = parser.parse_args()
    (wheel,) = options.folder.glob("gradcomp-*.whl")
    (sdist,) = options.folder.glob("gradcomp-*.tar.gz")
    expected = wheel.name.split("-")[1]
    num_checked = 0
    for python in options.pythons:
        version = version_of(python)
        if version is None:
            print(f"{python}: not found, skipped")
            continue
        num_modules = {check(python, distribution, expected) for distribution in (wheel, sdist)}
        if len(num_modules) != 1:
            raise RuntimeError(f"{python}: wheel and sdist have different numbers of modules: {num_modules}")
        print(f"Python {version}: wheel and sdist {expected} install, {num_modules.pop()} modules compile")
        num_checked += 1
    if not num_checked:
        sys.exit(f"none of these Pythons is there: {', '.join(options.pythons)}")


if __name__ == "__main__":
    main()
