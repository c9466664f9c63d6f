"""Which toolkit is found, per layout, and one error where none is."""

from pathlib import Path

import pytest
from toolkits import make_toolkit

from vllm_moe_ep.deepgemm import toolkit_places
from vllm_moe_ep.deepgemm.toolkit import Toolkit, find_toolkit
from vllm_moe_ep.deepgemm.unavailable import DeepGemmUnavailableError


def _find(environ: dict[str, str], system: tuple[str, ...] = (), site: str = "") -> Toolkit:
    return find_toolkit(environ, system, [site])


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
@pytest.mark.parametrize(
    "spelling", ["{}", ":{}", "{}:", " {}", "{} ", " : {} :\n", "{}/", "{}/../cuda-12.8"]
)
def test_variable_with_stray_characters(tmp_path: Path, variable: str, spelling: str) -> None:
    root = make_toolkit(tmp_path / "cuda-12.8")
    assert _find({variable: spelling.format(root)}).root == root


def test_symlinked_cuda_home_is_used_as_given(tmp_path: Path) -> None:
    root = make_toolkit(tmp_path / "cuda-12.8")
    (tmp_path / "cuda").symlink_to(root)
    found = _find({"CUDA_HOME": str(tmp_path / "cuda")})
    assert found.root == tmp_path / "cuda"
    assert found.nvcc.resolve() == root / "bin" / "nvcc"


def test_cuda_home_comes_before_cuda_path_and_both_before_path(tmp_path: Path) -> None:
    home, path, other = (make_toolkit(tmp_path / name) for name in ("home", "path", "other"))
    environ = {"CUDA_HOME": str(home), "CUDA_PATH": str(path), "PATH": str(other / "bin")}
    assert _find(environ).root == home
    assert _find(environ | {"CUDA_HOME": " : "}).root == path
    assert _find({"PATH": environ["PATH"]}).root == other


def test_path_before_system_before_conda_before_pip(tmp_path: Path) -> None:
    on_path, conda = make_toolkit(tmp_path / "on_path"), make_toolkit(tmp_path / "conda")
    system = make_toolkit(tmp_path / "system")
    pip = make_toolkit(tmp_path / "site" / "nvidia" / "cu13")
    environ = {"PATH": f":/nowhere: {on_path}/bin", "CONDA_PREFIX": str(conda)}
    site = str(tmp_path / "site")
    assert _find(environ, (str(system),), site).root == on_path
    assert _find(environ | {"PATH": ""}, (str(system),), site).root == system
    assert _find(environ | {"PATH": ""}, (), site).root == conda
    assert _find({}, (), site).root == pip


def test_nvcc_link_on_path_leads_to_its_toolkit(tmp_path: Path) -> None:
    root = make_toolkit(tmp_path / "cuda-13.0")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(root / "bin" / "nvcc")
    assert _find({"PATH": str(tmp_path / "bin")}).root == root


def test_wrapper_in_a_shared_prefix_is_the_last_resort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, system = make_toolkit(tmp_path / "local"), make_toolkit(tmp_path / "cuda-13.0")
    monkeypatch.setattr(toolkit_places, "_SHARED_PREFIXES", (str(prefix),))
    environ = {"PATH": f"{prefix}/bin"}
    assert _find(environ, (str(system),)).root == system
    assert _find(environ).root == prefix
    (prefix / "version.txt").write_text("CUDA Version 12.9.1")
    assert _find(environ, (str(system),)).root == prefix


def test_newest_versioned_system_folder(tmp_path: Path) -> None:
    for name in ("cuda-12.9", "cuda-12.10", "cuda-9.2"):
        make_toolkit(tmp_path / name)
    (tmp_path / "cuda-13.0").mkdir()
    assert _find({}, (f"{tmp_path}/cuda-*",)).root == tmp_path / "cuda-12.10"


@pytest.mark.parametrize("layout", ["nvidia/cu13", "nvidia/cu12", "nvidia/cuda_nvcc"])
def test_pip_layouts(tmp_path: Path, layout: str) -> None:
    root = make_toolkit(tmp_path / layout)
    assert _find({}, (), str(tmp_path)).root == root


@pytest.mark.parametrize("layout", [".", "targets/x86_64-linux"])
def test_conda_layouts(tmp_path: Path, layout: str) -> None:
    root = make_toolkit(tmp_path / layout)
    assert _find({"CONDA_PREFIX": str(tmp_path)}).root == root


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("missing", "does not exist"),
        ("file", "is not a folder"),
        ("empty", "has no bin/nvcc"),
        ("plain", "has a bin/nvcc that is not executable"),
    ],
)
def test_bad_variable_is_reported_and_not_replaced(
    tmp_path: Path, variable: str, name: str, fault: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (make_toolkit(tmp_path / "plain") / "bin" / "nvcc").chmod(0o644)
    good = make_toolkit(tmp_path / "good")
    environ = {variable: str(tmp_path / name), "PATH": f"{good}/bin"}
    with pytest.raises(DeepGemmUnavailableError) as caught:
        _find(environ)
    message = str(caught.value)
    assert f"{variable}='{tmp_path / name}'" in message
    assert f"{tmp_path / name} {fault}" in message
    assert f"unset {variable}" in message and str(good) in message


def test_several_folders_in_cuda_home_are_reported(tmp_path: Path) -> None:
    value = f"{make_toolkit(tmp_path / 'a')}:{make_toolkit(tmp_path / 'b')}"
    with pytest.raises(DeepGemmUnavailableError, match="CUDA_HOME.*does not exist"):
        _find({"CUDA_HOME": value})


def test_one_error_names_every_place_and_the_variable(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "nvidia").mkdir(parents=True)
    environ = {"CONDA_PREFIX": str(tmp_path / "conda"), "PATH": str(tmp_path)}
    with pytest.raises(ImportError) as caught:
        _find(environ, (str(tmp_path / "cuda"),), str(site))
    message = str(caught.value)
    folders = ["cuda", "conda", "conda/targets/x86_64-linux"]
    folders += [f"site/nvidia/{name}" for name in ("cu13", "cu12", "cuda_nvcc")]
    for folder in folders:
        assert f"{tmp_path / folder} (" in message
    for words in ("CUDA_HOME is not set", "CUDA_PATH is not set", "PATH has no nvcc"):
        assert words in message
    assert "Set CUDA_HOME" in message


def test_error_with_nothing_to_search_at_all() -> None:
    with pytest.raises(DeepGemmUnavailableError) as caught:
        _find({})
    for words in ("CONDA_PREFIX is not set", "nvidia/cu13, nvidia/cu12", "any package folder"):
        assert words in str(caught.value)


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_toolkit(tmp_path / "cuda")
    monkeypatch.chdir(tmp_path)
    assert _find({"CUDA_HOME": "cuda"}).root == root
    assert _find({"PATH": "cuda/bin"}).root == root
