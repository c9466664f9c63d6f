"""Every check before the deep_gemm library is used, and its import."""

import logging
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch

from vllm_moe_ep.deepgemm.jit_cache import CACHE_VARIABLE, prepare_jit_cache
from vllm_moe_ep.deepgemm.sources import absent, already_imported, find_source, import_library
from vllm_moe_ep.deepgemm.support import Capability, Feature, LibraryState, decide
from vllm_moe_ep.deepgemm.symbols import ALIGNMENT, Function, resolve_symbols
from vllm_moe_ep.deepgemm.toolkit import Toolkit, find_toolkit
from vllm_moe_ep.deepgemm.unavailable import DeepGemmUnavailableError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeepGemm:
    """One feature of the library, ready to be called.

    Attributes:
        description: source and version, for the log.
        capability: of the devices it was checked for.
        toolkit: what its kernels are compiled with.
        functions: by DeepGEMM's own name.
        alignment: rows to which each expert's share of a contiguous layout is padded; the
            library's own value. 1 for "mega", which has no such layout.
    """

    description: str
    capability: Capability
    toolkit: Toolkit
    functions: Mapping[str, Function]
    alignment: int


def visible_capabilities() -> tuple[Capability, ...]:
    """Compute capability of each visible CUDA device; empty without one. Initialises CUDA."""
    if torch.version.cuda is None or torch.cuda.device_count() == 0:
        return ()
    return tuple(map(torch.cuda.get_device_capability, range(torch.cuda.device_count())))


def load(
    feature: Feature,
    capabilities: Sequence[Capability],
    environ: MutableMapping[str, str],
    use_hub: bool = False,
) -> DeepGemm:
    """Check devices, toolkit, cache folder, library and its functions, in this order.

    Sets CUDA_HOME and DG_JIT_CACHE_DIR in `environ` before the import: the library reads both
    there, CUDA_HOME with any stray colon or blank that it may hold.

    Raises:
        DeepGemmUnavailableError: the first check that fails.
    """
    _require(capabilities, feature, LibraryState("present", "not looked for yet"))
    capability = capabilities[0]
    toolkit = find_toolkit(environ)
    fault = toolkit.fault_for(capability)
    if fault is not None:
        raise DeepGemmUnavailableError(fault)
    cache = prepare_jit_cache(environ, already_imported())
    for warning in filter(None, (toolkit.warning, cache.warning)):
        logger.warning("%s", warning)
    environ["CUDA_HOME"] = str(toolkit.root)
    environ[CACHE_VARIABLE] = str(cache.path)
    imported = import_library(use_hub)
    _require(capabilities, feature, imported.state)
    assert imported.module is not None, "a present library has a module"
    functions = resolve_symbols(imported.module, imported.source, feature, capability[0])
    logger.info(
        "DeepGEMM %s from %s, compiled by nvcc %s in %s, kernels kept in %s.",
        feature,
        imported.state.detail,
        toolkit.version,
        toolkit.root,
        cache.path,
    )
    alignment = _alignment(functions[ALIGNMENT]()) if ALIGNMENT in functions else 1
    return DeepGemm(imported.state.detail, capability, toolkit, functions, alignment)


def check_before_start(
    capabilities: Sequence[Capability], environ: Mapping[str, str], use_hub: bool = False
) -> str:
    """The checks of ``load`` that need neither CUDA nor the library's import.

    For the process that only starts workers: it must initialise no device, and a wrong set-up
    should be reported before a worker loads weights.

    Returns:
        The library's source, for the log.

    Raises:
        DeepGemmUnavailableError: the first check that fails.
    """
    source = find_source(use_hub)
    state = absent(use_hub) if source is None else LibraryState("present", source)
    _require(capabilities, "bf16", state)
    fault = find_toolkit(environ).fault_for(capabilities[0])
    if fault is not None:
        raise DeepGemmUnavailableError(fault)
    assert source is not None, "an absent library is refused above"
    return source


def _require(capabilities: Sequence[Capability], feature: Feature, state: LibraryState) -> None:
    decision = decide(capabilities, feature, state)
    if not decision.use:
        raise DeepGemmUnavailableError(f"DeepGEMM cannot serve here: {decision.reason}.")


def _alignment(answer: int | Sequence[int]) -> int:
    """Some releases answer with one number for M and K, some with one for each."""
    return answer if isinstance(answer, int) else answer[0]
