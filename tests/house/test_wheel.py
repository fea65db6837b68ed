"""Test what `make dist` builds: the sdist holds the project, the wheel gradcomp alone, and works."""

import email
import email.message
import glob
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
# A folder named build, which `make dist` leaves in a checkout, can be imported, too.
pytest.importorskip("build.env", reason="needs build: pip install build")

NOT_COPIED = (".git", ".venv", "build", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
# The sdist also has these, so that it can be tested, read and built without a checkout.
FOLDERS = (".ci", ".github", "benchmarks", "docs", "tests")
FILES = ("Makefile", "MANIFEST.in", "constraints.txt", "pyproject.toml")
TOOLS_FILES = ("mkdocs.yml", ".pre-commit-config.yaml")
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
PAGES = ("README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "SECURITY.md")


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_of_checkout(folder: Path) -> Path:
    """Copy this checkout without an earlier build's files, which setuptools would pack."""
    source = folder / "source"
    ignored = shutil.ignore_patterns(*NOT_COPIED)
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored, ignore_dangling_symlinks=True)
    return source


def wheel_of(source: Path, folder: Path) -> Path:
    """Build the wheel from a checkout, without an sdist."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    run(*command, "--disable-pip-version-check", "-w", str(folder), str(source), cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return copy_of_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def distribution(source, tmp_path_factory) -> Path:
    """Build like `make dist`; return the folder of the sdist, and of the wheel built from it."""
    folder = tmp_path_factory.mktemp("distribution")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    run(*command, str(source), cwd=source)
    return folder


@pytest.fixture(scope="module")
def wheel(distribution) -> Path:
    (wheel,) = distribution.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def sdist(distribution) -> Path:
    (sdist,) = distribution.glob("*.tar.gz")
    return sdist


@pytest.fixture(scope="module")
def metadata(wheel) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return email.message_from_bytes(archive.read(name))


def contents(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def files_of(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def expected_modules() -> set[str]:
    # Path.rglob would leave out gradcomp/kernels, a symbolic link.
    python = glob.glob("gradcomp/**/*.py", root_dir=ROOT, recursive=True)
    return {*python, "gradcomp/py.typed"}


def test_the_wheel_holds_gradcomp_alone(wheel):
    assert contents(wheel) == expected_modules()
    assert contents(wheel) >= {"gradcomp/kernels/flatten.py", "gradcomp/testing/ranks/simulation.py"}


def test_a_top_level_kernels_package_is_found(tmp_path):
    source = tmp_path / "source"
    for package in ("gradcomp", "kernels"):
        (source / package).mkdir(parents=True)
        (source / package / "module.py").touch()
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    project = (ROOT / "pyproject.toml").read_text()
    assert project.count('include = ["gradcomp*"]') == 1
    (source / "pyproject.toml").write_text(project.replace('include = ["gradcomp*"]', 'include = ["*"]'))
    assert "kernels/module.py" in contents(wheel_of(source, tmp_path))


def test_the_sdist_holds_the_project(sdist, source):
    """The kernels are files under gradcomp/kernels, and nowhere else; nothing is a link."""
    with tarfile.open(sdist) as archive:
        members = [member for member in archive.getmembers() if not member.isdir()]
    assert all(member.isreg() for member in members)
    names = {member.name.partition("/")[2] for member in members}
    made = {name for name in names if name.startswith("gradcomp.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    folders = [path for folder in FOLDERS for path in (source / folder).rglob("*") if path.is_file()]
    there = {str(path.relative_to(source)) for path in folders}
    there |= {name for name in (*FILES, *TOOLS_FILES, *PAGES) if (source / name).exists()}
    assert names - made == there | expected_modules()
    assert names >= {*PAGES, "Makefile", "docs/images/demo.png", "tests/house/test_wheel.py", ".ci/run"}


def test_the_wheel_of_the_sdist_is_that_of_the_checkout(wheel, source, tmp_path):
    theirs, ours = files_of(wheel), files_of(wheel_of(source, tmp_path))
    assert theirs.keys() == ours.keys()
    for name, content in ours.items():
        if name.endswith("/RECORD"):  # its lines are in the packing order
            assert sorted(theirs[name].splitlines()) == sorted(content.splitlines())
        else:
            assert theirs[name] == content, f"{name} differs"


def test_the_metadata(metadata):
    project = (ROOT / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.+)"$', project, flags=re.MULTILINE)
    assert metadata["Version"] == version
    assert metadata["Requires-Python"] == ">=3.10"
    assert (metadata["License-Expression"], metadata["License-File"]) == ("MIT", "LICENSE")
    classifiers = "\n".join(metadata.get_all("Classifier"))
    assert "License ::" not in classifiers  # License-Expression has replaced them
    assert re.findall(r"Python :: (3\..*)", classifiers) == PYTHONS
    urls = dict(each.split(", ") for each in metadata.get_all("Project-URL"))
    assert urls.keys() == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert all(url.startswith("https://") for url in urls.values())
    file = urls["Changelog"].removeprefix("https://github.com/gradcomp/gradcomp/blob/main/")
    assert f"## {version}" in (ROOT / file).read_text()


def test_the_description_is_the_readme(metadata):
    """Its links are absolute: tests/house/test_readme.py."""
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload(decode=True).decode().strip() == README.strip()


def test_the_wheel_installs_and_imports_in_a_clean_environment(wheel, tmp_path):
    """The environment has torch and Triton, but not this checkout."""
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"), cwd=tmp_path)
    python = str(tmp_path / "venv" / "bin" / "python")
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", where, cwd=tmp_path).strip())
    # A path file adds torch and Triton; path files in the added folder (the editable install's) are not read.
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    check = "import gradcomp; print(gradcomp.__file__)"
    absent = subprocess.run([python, "-c", check], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "No module named 'gradcomp'" in absent.stderr, "the environment has gradcomp already"

    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site)]
    run(*install, str(wheel), cwd=tmp_path)
    assert run(python, "-c", check, cwd=tmp_path).strip() == str(site / "gradcomp" / "__init__.py")
    version = "import gradcomp.kernels.flatten, gradcomp.hooks.default_hooks; print(gradcomp.__version__)"
    assert run(python, "-c", version, cwd=tmp_path).strip() == wheel.name.split("-")[1]
    lonely = (
        "import importlib.util as u; "
        "assert u.find_spec('kernels') is None; assert u.find_spec('tests') is None"
    )
    run(python, "-c", lonely, cwd=tmp_path)


def test_only_torch_and_triton_are_required(metadata):
    required = [each for each in metadata.get_all("Requires-Dist") if "extra" not in each]
    assert sorted(each.split(">")[0] for each in required) == ["torch", "triton"]
