"""Which platform this process runs on, and what it offers: one cached probe.

The probe initialises no device: the process that asks may still fork workers that use it.
"""

import glob
import importlib.util
from dataclasses import dataclass
from functools import cache

from vllm_moe_ep.cuda_devices import CudaDevice, visible_devices
from vllm_moe_ep.errors import UnsupportedError

CUDA_LAYER = "the DeepGEMM layer"
NEURON_LAYER = "the static-shape EP layer (NKI kernels)"
# AWS's kernel language, and its vLLM platform, whose models the layer is put into.
_NEURON_PACKAGES = ("nki", "vllm_neuron")
# Major compute capabilities; support.py of deepgemm decides on each one and format.
_CUDA_MAJORS = (9, 10)


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the probe found.

    Attributes:
        kind: "cpu", "cuda" or "neuron".
        device_name: for people.
        capability: CUDA compute capability (major, minor), None elsewhere.
        offers: what static-ep can build on here, in words.
        reason: why this kind was chosen, in words.
    """

    kind: str
    device_name: str
    capability: tuple[int, int] | None
    offers: str
    reason: str


@cache
def probe(platform: str = "auto") -> Hardware:
    """Find the platform; `platform` other than "auto" overrides the search."""
    if platform == "auto":
        return _search()
    why = f"VLLM_MOE_EP_PLATFORM={platform}"
    if platform == "neuron":
        return _neuron(why)
    return _cuda(why) if platform == "cuda" else _cpu(why)


def _search() -> Hardware:
    if _has_neuron():
        return _neuron("torch_neuronx is installed and a /dev/neuron device exists")
    if _has_cuda():
        return _cuda("torch finds a CUDA device")
    return _cpu("no Neuron device and no CUDA device was found")


def _has_neuron() -> bool:
    return bool(glob.glob("/dev/neuron*")) and importlib.util.find_spec("torch_neuronx") is not None


def _has_cuda() -> bool:
    return bool(_cuda_devices())


@cache
def _cuda_devices() -> tuple[CudaDevice, ...]:
    """Visible devices that this torch can use; empty with a CPU build of it."""
    import torch

    return () if torch.version.cuda is None else visible_devices()


def _cpu(reason: str) -> Hardware:
    return Hardware("cpu", "CPU", None, "the static-shape EP layer in host mode", reason)


def _neuron(reason: str) -> Hardware:
    offers = f"{NEURON_LAYER}, which has not run on a device yet (docs/trainium.md)"
    return Hardware("neuron", "AWS Neuron", None, offers, reason)


def _cuda(reason: str) -> Hardware:
    devices = _cuda_devices() if _has_cuda() else ()
    if not devices:
        return Hardware("cuda", "no CUDA device", None, "nothing", reason)
    first = devices[0]
    has_layer = first.capability[0] in _CUDA_MAJORS
    offers = CUDA_LAYER if has_layer else "nothing"
    return Hardware("cuda", first.name, first.capability, offers, reason)


def require_layer(hardware: Hardware) -> str:
    """The name of the layer that serves on `hardware`.

    Raises:
        UnsupportedError: no layer of this package runs there, or what it builds on is missing.
    """
    if hardware.kind == "cpu":
        return "the static-shape EP layer (CPU host mode)"
    if hardware.kind == "cuda":
        return _require_cuda_layer(hardware)
    return _require_neuron_layer(hardware)


def _require_neuron_layer(hardware: Hardware) -> str:
    missing = [name for name in _NEURON_PACKAGES if not _is_installed(name)]
    if missing:
        raise UnsupportedError(
            f"static-ep on {hardware.device_name} ({hardware.reason}) needs the packages "
            f"{' and '.join(_NEURON_PACKAGES)}, and does not find {' and '.join(missing)}: install "
            "AWS's Neuron SDK with vllm-neuron (docs/trainium.md), or choose another "
            "--moe-backend (auto is vLLM's default)."
        )
    return NEURON_LAYER


def _is_installed(package: str) -> bool:
    """Whether it is a real package: any folder of that name is found too, but has no origin."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _require_cuda_layer(hardware: Hardware) -> str:
    if hardware.capability is None:
        raise UnsupportedError(
            f"static-ep finds no CUDA device that torch can use ({hardware.reason}): make one "
            "visible (CUDA_VISIBLE_DEVICES), install a CUDA build of torch, or serve on CPU."
        )
    major, minor = hardware.capability
    if major not in _CUDA_MAJORS:
        raise UnsupportedError(
            f"static-ep has no layer for {hardware.device_name} of compute capability "
            f"{major}.{minor}; {CUDA_LAYER} needs 9.0 (Hopper) or 10 (Blackwell): choose another "
            "--moe-backend (auto is vLLM's default)."
        )
    return f"{CUDA_LAYER} (SM{major}{minor})"
