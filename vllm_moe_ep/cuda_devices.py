"""The CUDA devices this process may use, found without initialising CUDA in it.

A process that has initialised CUDA cannot fork workers that use it, and vLLM forks. The driver's
management library (NVML) answers without a CUDA context. Where it is missing or does not know a
device that CUDA_VISIBLE_DEVICES names, a child process asks torch.
"""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_NVML = "libnvidia-ml.so.1"
_NAME_BYTES = 96
_CHILD_TIMEOUT_S = 120.0
_CHILD = """
import json, torch
devices = range(torch.cuda.device_count())
print(json.dumps([[torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i)]
                  for i in devices]))
"""


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One visible device: its name, and its compute capability (major, minor)."""

    name: str
    capability: tuple[int, int]


class NvmlError(RuntimeError):
    """NVML is absent or refuses a question."""


def visible_devices(environ: Mapping[str, str] | None = None) -> tuple[CudaDevice, ...]:
    """Every device that CUDA would show this process; empty where there is none.

    Devices that are chosen by number come in NVML's order (by PCI address), which CUDA's own can
    differ from where a host has unlike devices.

    Args:
        environ: the environment; the process's own when None.

    Raises:
        RuntimeError: NVML cannot tell, and CUDA does not start in a child process either.
    """
    visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    try:
        return _ask_nvml(visible)
    except NvmlError:
        return _ask_child()


def _ask_nvml(visible: str | None) -> tuple[CudaDevice, ...]:
    library = load_nvml()
    _call(library.nvmlInit_v2)
    try:
        return tuple(_describe(library, handle) for handle in _handles(library, visible))
    finally:
        library.nvmlShutdown()


def load_nvml() -> ctypes.CDLL:
    """The management library.

    Raises:
        NvmlError: it is not installed.
    """
    try:
        return ctypes.CDLL(_NVML)
    except OSError as error:
        raise NvmlError(f"{_NVML} does not load: {error}") from error


def _call(function: Callable[..., int], *arguments: object) -> None:
    status = function(*arguments)
    if status != 0:
        raise NvmlError(f"{function.__name__} answers with error {status}")


def _handles(library: ctypes.CDLL, visible: str | None) -> list[ctypes.c_void_p]:
    count = ctypes.c_uint()
    _call(library.nvmlDeviceGetCount_v2, ctypes.byref(count))
    if visible is None:
        return [_by_index(library, index) for index in range(count.value)]
    handles = []
    for name in (part.strip() for part in visible.split(",")):
        if name.isdigit() and int(name) < count.value:
            handles.append(_by_index(library, int(name)))
        elif name.startswith(("GPU-", "MIG-")):
            handles.append(_by_uuid(library, name))
        else:
            # CUDA too stops at the first entry that names no device, as "-1" is meant to.
            break
    return handles


def _by_index(library: ctypes.CDLL, index: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _call(library.nvmlDeviceGetHandleByIndex_v2, ctypes.c_uint(index), ctypes.byref(handle))
    return handle


def _by_uuid(library: ctypes.CDLL, uuid: str) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _call(library.nvmlDeviceGetHandleByUUID, uuid.encode(), ctypes.byref(handle))
    if uuid.startswith("MIG-"):
        whole = ctypes.c_void_p()
        _call(library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle, ctypes.byref(whole))
        return whole
    return handle


def _describe(library: ctypes.CDLL, handle: ctypes.c_void_p) -> CudaDevice:
    name = ctypes.create_string_buffer(_NAME_BYTES)
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call(library.nvmlDeviceGetName, handle, name, ctypes.c_uint(_NAME_BYTES))
    _call(
        library.nvmlDeviceGetCudaComputeCapability,
        handle,
        ctypes.byref(major),
        ctypes.byref(minor),
    )
    return CudaDevice(name.value.decode(errors="replace"), (major.value, minor.value))


def _ask_child() -> tuple[CudaDevice, ...]:
    """The same from torch in a child process; takes a few seconds."""
    answer = subprocess.run(
        [sys.executable, "-c", _CHILD],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_CHILD_TIMEOUT_S,
        check=False,
    )
    if answer.returncode != 0:
        said = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"A child process cannot ask torch for the CUDA devices: {said}")
    devices = json.loads(answer.stdout.splitlines()[-1])
    return tuple(CudaDevice(name, (major, minor)) for name, major, minor in devices)
