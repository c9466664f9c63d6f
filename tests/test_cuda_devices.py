"""CUDA devices through NVML, as CUDA_VISIBLE_DEVICES selects them, and the way without NVML."""

import ctypes
from typing import Any

import pytest

from vllm_moe_ep import cuda_devices
from vllm_moe_ep.cuda_devices import CudaDevice, NvmlError, visible_devices

A = CudaDevice("NVIDIA H200", (9, 0))
B = CudaDevice("NVIDIA B200", (10, 0))
HOST = {0: A, 1: B}
UUIDS = {b"GPU-aa": 0, b"GPU-bb": 1, b"MIG-cc": 7}
WHOLE_OF_MIG = {7: 1}


class FakeNvml:
    """A host with two devices; handles are their indices."""

    def __init__(self) -> None:
        self.open = 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(HOST)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        if uuid not in UUIDS:
            return 6
        handle._obj.value = UUIDS[uuid]
        return 0

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: Any, whole: Any) -> int:
        whole._obj.value = WHOLE_OF_MIG[handle.value]
        return 0

    def nvmlDeviceGetName(self, handle: Any, name: Any, size: Any) -> int:
        name.value = HOST[handle.value or 0].name.encode()
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = HOST[handle.value or 0].capability
        return 0


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    library = FakeNvml()
    monkeypatch.setattr(cuda_devices, "load_nvml", lambda: library)
    return library


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (A, B)),
        ("0,1", (A, B)),
        ("1", (B,)),
        ("1,0", (B, A)),
        ("GPU-bb", (B,)),
        ("MIG-cc", (B,)),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", (A,)),
        ("0,9,1", (A,)),
    ],
)
def test_what_cuda_would_show(
    nvml: FakeNvml, visible: str | None, expected: tuple[CudaDevice, ...]
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_devices(environ) == expected
    assert nvml.open == 0


def test_a_child_process_answers_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> ctypes.CDLL:
        raise NvmlError("absent")

    monkeypatch.setattr(cuda_devices, "load_nvml", absent)
    monkeypatch.setattr(cuda_devices, "_CHILD", "print('[[\"NVIDIA H200\", 9, 0]]')")
    assert visible_devices({}) == (A,)
    monkeypatch.setattr(cuda_devices, "_CHILD", "raise SystemExit('the driver is too old')")
    with pytest.raises(RuntimeError, match="the driver is too old"):
        visible_devices({})


def test_a_uuid_that_nvml_does_not_know_goes_to_the_child(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_devices, "_CHILD", "print('[]')")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "GPU-unknown"}) == ()
    assert nvml.open == 0
