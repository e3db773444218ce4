"""What an install puts where: rapidmoe_jax and nothing else, visible to type checkers, for a wheel and an editable."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FINDS_ALL = """
import importlib, pathlib, rapidmoe_jax
for name in ("pallas", "models", "host_kernels", "tests", "src", "setup"):
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    raise SystemExit(f"import {name} works")
import rapidmoe_jax.pallas.reference, rapidmoe_jax.models.decoder
assert (rapidmoe_jax.demo_path() / "config.json").exists()
print(pathlib.Path(rapidmoe_jax.__file__).parent)
"""
TYPED = """
import rapidmoe_jax
from rapidmoe_jax.host_kernels import isa
from rapidmoe_jax.models.decoder import layer_runs
from rapidmoe_jax.pallas.reference import unpack_codes
wrong: int = rapidmoe_jax.load("demo").generate("x").text
bad: int = isa()
"""


def run_elsewhere(folder: Path, *command, path: str = "") -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ({"PYTHONPATH": path} if path else {})
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def check_types(folder: Path, *options) -> str:
    (folder / "user.py").write_text(TYPED)
    (folder / "pyrefly.toml").write_text("")
    binary = Path(sys.executable).parent / "pyrefly"
    return run_elsewhere(
        folder, binary, "check", "--python-interpreter-path", sys.executable, *options, "user.py"
    ).stdout


def assert_types_seen(output: str) -> None:
    """Both wrong assignments are found, and no module is missing."""
    assert output.count("ERROR") == 2 == output.count("bad-assignment"), output


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel unpacked in a folder of its own: what pip would put into site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("*.whl")
    target = folder / "site"
    with zipfile.ZipFile(file) as archive:
        archive.extractall(target)
    return target


def test_editable_install_gives_rapidmoe_jax_alone(tmp_path):
    done = run_elsewhere(tmp_path, sys.executable, "-c", FINDS_ALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Path(done.stdout.strip()).resolve() == ROOT / "rapidmoe_jax"


def test_type_checkers_see_an_editable_install(tmp_path):
    assert_types_seen(check_types(tmp_path))


def test_wheel_holds_rapidmoe_jax_alone(wheel, tmp_path):
    assert sorted(p.name.split("-")[0] for p in wheel.iterdir()) == ["rapidmoe_jax", "rapidmoe_jax"]
    assert not list(wheel.rglob("*.cc")) and not list(wheel.rglob("*.h"))
    done = run_elsewhere(tmp_path, sys.executable, "-c", FINDS_ALL, path=str(wheel))
    assert done.returncode == 0, done.stdout + done.stderr
    assert Path(done.stdout.strip()) == wheel / "rapidmoe_jax"


def test_type_checkers_see_a_wheel_install(wheel, tmp_path):
    assert_types_seen(check_types(tmp_path, "--search-path", str(wheel)))


def test_the_demo_model_runs_from_a_wheel(wheel, tmp_path, demo_cache):
    command = (sys.executable, "-m", "rapidmoe_jax", "generate", "demo", "It was", "--max-new-tokens", "3")
    done = run_elsewhere(tmp_path, *command, path=str(wheel))
    assert done.returncode == 0 and "3 tokens, length" in done.stderr, done.stderr
