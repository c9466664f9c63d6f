"""The deep_gemm library of this process: loaded at the first call, one outcome per feature."""

import os

import torch

from vllm_moe_ep.cuda_devices import visible_devices
from vllm_moe_ep.deepgemm.jit_cache import CACHE_VARIABLE
from vllm_moe_ep.deepgemm.loading import (
    DeepGemm,
    check_before_start,
    load,
    visible_capabilities,
)
from vllm_moe_ep.deepgemm.support import Feature
from vllm_moe_ep.deepgemm.unavailable import DeepGemmUnavailableError

_loaded: dict[Feature, DeepGemm] = {}
_refusals: dict[tuple[Feature, bool], str] = {}


def deep_gemm(feature: Feature, use_hub: bool = False) -> DeepGemm:
    """The library, checked and imported at the first call in this process, cached after it.

    May be called under torch.compile(fullgraph=True), the first time too. Initialises CUDA, so
    only call it in the process that runs the layer.

    Args:
        use_hub: where neither module is installed, download it from Hugging Face's kernel hub.

    Raises:
        DeepGemmUnavailableError: an ImportError that says why not and what to do; the same
            again at each further call.
    """
    _ensure_loaded(feature, use_hub)
    return _loaded[feature]


@torch.compiler.assume_constant_result
def _ensure_loaded(feature: Feature, use_hub: bool) -> bool:
    """Fills `_loaded`. Dynamo runs it as it is and keeps its constant; it can't keep functions."""
    if feature in _loaded:
        return True
    request = (feature, use_hub)
    if request not in _refusals:
        try:
            _loaded[feature] = load(feature, visible_capabilities(), os.environ, use_hub)
            return True
        except DeepGemmUnavailableError as error:
            _refusals[request] = str(error)
    raise DeepGemmUnavailableError(_refusals[request])


def check_deep_gemm() -> str:
    """Whether workers of this process could load the library, without initialising CUDA here.

    Returns:
        The library's source.

    Raises:
        DeepGemmUnavailableError: they could not; says why and what to do.
    """
    capabilities = [device.capability for device in visible_devices()]
    return check_before_start(capabilities, os.environ)


def kernel_cache() -> str:
    """The folder of compiled kernels; set by the first call of ``deep_gemm``."""
    return os.environ[CACHE_VARIABLE]
