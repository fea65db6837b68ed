"""Test that a built wheel holds gradcomp alone, kernels included, and works in a clean environment."""

import glob
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path, included: str = "gradcomp*") -> Path:
    """Build the wheel from a copy of this checkout: setuptools packs what an earlier build left there."""
    source = folder / "source"
    source.mkdir()
    files = ["pyproject.toml", "README.md", "LICENSE", "gradcomp", "kernels"]
    run("cp", "-r", *files, str(source), cwd=ROOT)
    project = source / "pyproject.toml"
    project.write_text(project.read_text().replace('include = ["gradcomp*"]', f'include = ["{included}"]'))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    run(*command, "--disable-pip-version-check", "-w", str(folder), str(source), cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


def contents(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def expected_modules() -> set[str]:
    # Path.rglob would leave out gradcomp/kernels, a symbolic link.
    python = glob.glob("gradcomp/**/*.py", root_dir=ROOT, recursive=True)
    return {*python, "gradcomp/py.typed"}


def test_the_wheel_holds_gradcomp_alone(wheel):
    assert contents(wheel) == expected_modules()
    assert contents(wheel) >= {"gradcomp/kernels/flatten.py", "gradcomp/testing/ranks/scheduler.py"}


def test_a_top_level_kernels_package_is_found(tmp_path):
    stray = contents(build(tmp_path, included="*")) - expected_modules()
    assert "kernels/flatten.py" in stray


def test_the_wheel_installs_and_imports_in_a_clean_environment(wheel, tmp_path):
    """The environment has torch and Triton, but not this checkout."""
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"), cwd=tmp_path)
    python = str(tmp_path / "venv" / "bin" / "python")
    site = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    )
    # A path file adds torch and Triton; path files in the added folder (the editable install's) are not read.
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    check = "import gradcomp; print(gradcomp.__file__)"
    absent = subprocess.run([python, "-c", check], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "No module named 'gradcomp'" in absent.stderr, (
        "the environment isn't clean: it already has gradcomp"
    )

    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(site),
        str(wheel),
        cwd=tmp_path,
    )
    assert run(python, "-c", check, cwd=tmp_path).strip() == str(site / "gradcomp" / "__init__.py")
    run(python, "-c", "import gradcomp.kernels.flatten, gradcomp.hooks.default_hooks", cwd=tmp_path)
    lonely = (
        "import importlib.util as u; "
        "assert u.find_spec('kernels') is None; assert u.find_spec('tests') is None"
    )
    run(python, "-c", lonely, cwd=tmp_path)


def test_only_torch_and_triton_are_required(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = archive.read(name).decode()
    required = [
        line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra" not in line
    ]
    assert sorted(line.split()[1].split(">")[0] for line in required) == ["torch", "triton"]
