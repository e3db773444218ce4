"""House rules that can be counted: imports one way, file sizes, README code and tree true, config fields read."""

import ast
import dataclasses
import re
import subprocess
from pathlib import Path

import pytest

from rapidmoe_jax.config import ModelConfig, SplitConfig

ROOT = Path(__file__).parents[1]
MAX_LINES = 300

# A module may import modules of a lower level only.
LEVELS = [
    {"rapidmoe_jax.config", "rapidmoe_jax.activation"},
    {"rapidmoe_jax.quant", "rapidmoe_jax.host_kernels", "rapidmoe_jax.checkpoint", "rapidmoe_jax.cache",
     "rapidmoe_jax.memory",
     "rapidmoe_jax.experts"},
    {"rapidmoe_jax.host_kernels.ops", "rapidmoe_jax.machine", "rapidmoe_jax.pallas.reference", "rapidmoe_jax.policy",
     "rapidmoe_jax.store", "rapidmoe_jax.models.published", "rapidmoe_jax.chat", "rapidmoe_jax.source",
     "rapidmoe_jax.gptq", "rapidmoe_jax.expert_split"},
    {"rapidmoe_jax.text", "rapidmoe_jax.residual", "rapidmoe_jax.sampling", "rapidmoe_jax.rank",
     "rapidmoe_jax.models.qwen_moe",
     "rapidmoe_jax.models.mixtral", "rapidmoe_jax.models.olmoe", "rapidmoe_jax.models.deepseek",
     "rapidmoe_jax.models.gpt_oss"},
    {"rapidmoe_jax.policies", "rapidmoe_jax.models"},
    {"rapidmoe_jax.moe", "rapidmoe_jax.models.blocks", "rapidmoe_jax.models.rope", "rapidmoe_jax.controller"},
    {"rapidmoe_jax.models.attention", "rapidmoe_jax.models.router", "rapidmoe_jax.models.shapes"},
    {"rapidmoe_jax.models.decoder"},
    {"rapidmoe_jax.calibration", "rapidmoe_jax.loading", "rapidmoe_jax.steps"},
    {"rapidmoe_jax.damage", "rapidmoe_jax.cost"},
    {"rapidmoe_jax.resplit"},
    {"rapidmoe_jax.demo", "rapidmoe_jax.generate"},
    {"rapidmoe_jax.model"},
    {"rapidmoe_jax.evaluation", "rapidmoe_jax.bench", "rapidmoe_jax.report"},
    {"rapidmoe_jax.frontier"},
    {"rapidmoe_jax", "rapidmoe_jax.pallas"},
    {"rapidmoe_jax.commands"},
    {"rapidmoe_jax.cli"},
    {"rapidmoe_jax.__main__"},
]  # fmt: skip


def modules() -> dict[str, Path]:
    found = {}
    for folder, prefix in (
        ("rapidmoe_jax", ""),
        ("pallas", ".pallas"),
        ("models", ".models"),
        ("host_kernels", ".host_kernels"),
    ):
        for path in (ROOT / folder).glob("*.py"):
            name = f"rapidmoe_jax{prefix}.{path.stem}".removesuffix(".__init__")
            found[name] = path
    return found


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.splitlines()]


def imports_of(path: Path, known: dict[str, Path]) -> set[str]:
    out = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            out |= {name if name in known else node.module for name in full}
    return out


def test_imports_go_one_way():
    known = modules()
    level = {name: i for i, names in enumerate(LEVELS) for name in names}
    assert set(level) == set(known)
    for name, path in known.items():
        for used in imports_of(path, known):
            assert used.split(".")[0] not in ("pallas", "models", "host_kernels", "tests"), f"{name} imports {used}"
            if used in level and used != name:
                assert level[used] < level[name], f"{name} (level {level[name]}) imports {used} (level {level[used]})"


def test_no_module_delays_its_annotations():
    for path in modules().values():
        assert "from __future__ import annotations" not in path.read_text(), path


def test_files_stay_small():
    long = {
        str(p.relative_to(ROOT)): n
        for p in tracked()
        if p.suffix in (".py", ".cc", ".h", ".cu") and (n := len(p.read_text().splitlines())) > MAX_LINES
    }
    assert not long


def test_every_config_field_is_read():
    text = "\n".join(p.read_text() for name, p in modules().items() if name != "rapidmoe_jax.config")
    config = (ROOT / "rapidmoe_jax" / "config.py").read_text()
    for cls in (ModelConfig, SplitConfig):
        for field in dataclasses.fields(cls):
            used = re.search(rf"\.{field.name}\b", text) or re.search(rf"self\.{field.name}\b.*\n.*\bdef\b", config)
            assert used or field.name == "model_type", f"{cls.__name__}.{field.name} is never read"


def test_readme_tree_is_true():
    """Every file of the four folders stands in the README's tree, and nothing else does."""
    readme = (ROOT / "README.md").read_text()
    tree = re.search(r"## Where things are\n.*?```\n(.*?)```", readme, re.S)[1]
    named, folder = set(), ""
    for line in tree.splitlines():
        if match := re.match(r"(\S+/) ", line):
            folder = match[1]
        elif match := re.match(r"  (\S+)", line):
            named |= {folder + part for part in match[1].split(",") if part and not part.endswith("/")}
    wanted = {
        str(p.relative_to(ROOT))
        for p in tracked()
        if p.parent.name in ("rapidmoe_jax", "pallas", "models", "host_kernels") and not p.is_symlink()
        and p.name not in ("py.typed", "__init__.py", "__main__.py")
    }  # fmt: skip
    shown = {name for name in named if name.split("/")[0] in ("rapidmoe_jax", "pallas", "models", "host_kernels")}
    assert shown == wanted, f"missing {wanted - shown}, gone {shown - wanted}"


def test_readme_python_runs(demo_cache, tmp_path, monkeypatch, capsys):
    """The README's Python blocks, one after the other, as a user would type them."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) >= 2
    scope: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)
    assert capsys.readouterr().out.strip()


def test_readme_commands_exist():
    """Every `rapidmoe X` and `make X` in the README is a command or target."""
    readme = (ROOT / "README.md").read_text()
    from rapidmoe_jax.cli import _parser

    commands = next(a.choices for a in _parser()._actions if hasattr(a, "choices") and a.choices)
    for used in set(re.findall(r"(?:^|[`|] ?)rapidmoe ([a-z]+)", readme, re.M)):
        assert used in commands, f"rapidmoe {used}"
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for used in set(re.findall(r"`make ([a-z]+)`|^make ([a-z]+)", readme, re.M)):
        assert (used[0] or used[1]) in targets, used


def test_no_machine_paths():
    for path in tracked():
        if path.suffix in (".py", ".cc", ".h", ".md", ".toml", ".yml", "") and path.is_file() and not path.is_symlink():
            text = path.read_text(errors="ignore")
            assert not re.search(r"/(root|work|farm)/[A-Za-z0-9_.-]+", text), path
