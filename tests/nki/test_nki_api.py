"""Which NKI the kernels get, in processes where it or the emulator is missing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_moe_ep_kernels import nki_api
from vllm_moe_ep_kernels.nki.launch import has_simulator, launch

_KERNELS = Path(nki_api.__file__).parent.parent
_WITHOUT_EMULATOR = """
import sys
sys.path.insert(0, {kernels!r})
sys.path.insert(0, {folder!r})
sys.modules["vllm_moe_ep_kernels.nki_emulator"] = None
from vllm_moe_ep_kernels.nki import experts, expert_cost, ops
print(experts.nl.__name__)
"""


def test_the_kernels_name_no_emulator() -> None:
    """Neither by import nor as text."""
    sources = list((_KERNELS / "vllm_moe_ep_kernels" / "nki").glob("*.py"))
    assert len(sources) > 10
    assert not [path.name for path in sources if "nki_emulator" in path.read_text()]


def import_kernels(folder: Path) -> subprocess.CompletedProcess[str]:
    code = _WITHOUT_EMULATOR.format(kernels=str(_KERNELS), folder=str(folder))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_a_device_needs_no_emulator(tmp_path: Path) -> None:
    package = tmp_path / "nki"
    package.mkdir()
    (package / "__init__.py").write_text("jit = simulate = print\n")
    for name in ("language", "isa"):
        (package / f"{name}.py").write_text("")
    result = import_kernels(tmp_path)
    assert result.stdout == "nki.language\n", result.stderr


@pytest.mark.skipif(has_simulator(), reason="NKI is installed")
def test_without_either_the_error_says_what_to_install(tmp_path: Path) -> None:
    result = import_kernels(tmp_path)
    assert "found neither it nor this package's emulator" in result.stderr


@pytest.mark.skipif(has_simulator(), reason="NKI is installed")
def test_tensors_of_a_device_need_nki() -> None:
    with pytest.raises(ImportError, match="NKI, which is not installed"):
        launch(lambda x: x, 2, {"x": torch.ones(1, device="meta")})
