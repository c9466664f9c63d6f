"""Versions from files and from nvcc, and what they allow on which device."""

from pathlib import Path

import pytest
import torch
from toolkits import make_toolkit, was_asked

from vllm_moe_ep.deepgemm.toolkit import Toolkit, find_toolkit
from vllm_moe_ep.deepgemm.toolkit_version import read_version

JSON = '{"cuda_nvcc": {"version": "12.8.93"}, "cuda": {"version": "12.7.1"}}'
HEADER = "/* cuda.h */\n#define CUDA_VERSION 12090\n"


@pytest.mark.parametrize(
    ("files", "number"),
    [
        ({"version_json": JSON, "version_txt": "CUDA Version 11.8.0"}, (12, 8)),
        ({"version_json": '{"cuda": {"version": "13.0.2"}}'}, (13, 0)),
        ({"version_json": '{"cuda_nvcc": {}, "cuda": {"version": "13.0.2"}}'}, (13, 0)),
        ({"version_json": "{", "version_txt": "CUDA Version 12.3.107"}, (12, 3)),
        ({"version_json": "[]", "cuda_h": HEADER}, (12, 9)),
        ({"version_txt": "CUDA Version 12.10.1", "cuda_h": HEADER}, (12, 10)),
        ({"cuda_h": "#  define CUDA_VERSION 13000"}, (13, 0)),
        ({"conda_cuda_h": HEADER}, (12, 9)),
    ],
)
def test_files_tell_the_version_without_a_subprocess(
    tmp_path: Path, files: dict[str, str], number: tuple[int, int]
) -> None:
    root = make_toolkit(tmp_path / "cuda", release="9.9", **files)
    assert read_version(root).number == number
    assert not was_asked(root)


@pytest.mark.parametrize(
    "files", [{"version_json": "{"}, {"version_json": "{}", "version_txt": "x", "cuda_h": "x"}]
)
def test_unreadable_files_mark_a_damaged_toolkit(tmp_path: Path, files: dict[str, str]) -> None:
    root = make_toolkit(tmp_path / "cuda", **files)
    found = read_version(root)
    assert found.number is None and found.is_damaged
    assert all(str(root) in name for name in found.source.split(" from ")[1].split(", "))
    assert not was_asked(root)
    toolkit = Toolkit(root, "CUDA_HOME", found)
    assert "damaged" in str(toolkit.fault_for((9, 0))) and toolkit.warning is None


@pytest.mark.parametrize(
    ("release", "capability", "accepted"),
    [
        ("12.1", (9, 0), False),
        ("12.3", (9, 0), True),
        ("12.8", (9, 0), True),
        ("12.10", (9, 0), True),
        ("13.0", (9, 0), True),
        ("12.1", (10, 0), False),
        ("12.3", (10, 0), False),
        ("12.8", (10, 0), False),
        ("12.9", (10, 0), True),
        ("12.10", (10, 0), True),
        ("13.0", (10, 0), True),
        ("12.8", (10, 3), False),
        ("12.9", (10, 3), True),
    ],
)
@pytest.mark.parametrize("torch_cuda", [None, "11.8", "13.1"])
def test_floor_of_each_device_whatever_torch_was_built_with(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    release: str,
    capability: tuple[int, int],
    accepted: bool,
    torch_cuda: str | None,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    root = make_toolkit(tmp_path / "cuda", release)
    toolkit = find_toolkit({"CUDA_HOME": str(root)})
    assert was_asked(root)
    fault = toolkit.fault_for(capability)
    assert toolkit.warning is None
    if accepted:
        assert fault is None
        return
    needed = {9: "12.3", 10: "12.9"}[capability[0]]
    assert fault is not None
    for words in (f"needs nvcc {needed}", f"found {release}", str(root / "bin" / "nvcc")):
        assert words in fault


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo garbage", "prints no release number"),
        ("true", "prints no release number"),
        ("echo release 12.1; exit 3", "exits with status 3"),
        ("sleep 30", "no answer within 0.5 s"),
    ],
)
def test_silent_nvcc_is_a_warning_and_does_not_block(
    tmp_path: Path, script: str, reason: str
) -> None:
    root = make_toolkit(tmp_path / "cuda", script=script)
    toolkit = find_toolkit({"CUDA_HOME": str(root)}, timeout_s=0.5)
    assert toolkit.version.number is None
    assert toolkit.fault_for((9, 0)) is None and toolkit.fault_for((10, 0)) is None
    assert reason in str(toolkit.warning) and str(root) in str(toolkit.warning)


def test_an_nvcc_that_does_not_start_is_a_warning(tmp_path: Path) -> None:
    root = make_toolkit(tmp_path / "cuda")
    (root / "bin" / "nvcc").write_text("#!/nowhere/sh\n")
    assert "does not start" in str(find_toolkit({"CUDA_HOME": str(root)}).warning)
