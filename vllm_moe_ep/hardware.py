"""Which platform this process runs on, and what it offers: one cached probe."""

import glob
import importlib.util
from dataclasses import dataclass
from functools import cache

from vllm_moe_ep.errors import UnsupportedError


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
    """Find the platform; `platform` other than "auto" overrides the search.

    Where a CUDA device is found, asking for its name and capability initialises CUDA in this
    process.
    """
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
    import torch

    return torch.version.cuda is not None and torch.cuda.device_count() > 0


def _cpu(reason: str) -> Hardware:
    return Hardware("cpu", "CPU", None, "the static-shape EP layer in host mode", reason)


def _neuron(reason: str) -> Hardware:
    offers = "NKI kernels that have not run on a device yet (docs/trainium.md); no serving"
    return Hardware("neuron", "AWS Neuron", None, offers, reason)


def _cuda(reason: str) -> Hardware:
    import torch

    if not _has_cuda():
        return Hardware("cuda", "no CUDA device", None, "nothing yet", reason)
    capability = torch.cuda.get_device_capability()
    return Hardware("cuda", torch.cuda.get_device_name(), capability, "nothing yet", reason)


def require_layer(hardware: Hardware) -> str:
    """The name of the layer that serves on `hardware`.

    Raises:
        UnsupportedError: no layer of this package runs there yet.
    """
    if hardware.kind == "cpu":
        return "the static-shape EP layer (CPU host mode)"
    raise UnsupportedError(
        f"static-ep has no layer for {hardware.device_name} yet ({hardware.reason}): choose "
        "another --moe-backend (auto is vLLM's default), or serve on CPU."
    )
