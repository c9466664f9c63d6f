"""Which functions of the library each feature needs, and their lookup.

Names are those of DeepGEMM 2.8; a second spelling is that of other releases.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from vllm_moe_ep.deepgemm.support import Feature
from vllm_moe_ep.deepgemm.unavailable import DeepGemmUnavailableError

Function = Callable[..., Any]
Spellings = tuple[str, ...]

ALIGNMENT = "get_mk_alignment_for_contiguous_layout"
_COMMON: tuple[Spellings, ...] = ((ALIGNMENT, "get_m_alignment_for_contiguous_layout"),)
SET_ALIGNMENT = "set_mk_alignment_for_contiguous_layout"
# Called where present: without it the library's own alignment serves every size.
OPTIONAL: tuple[str, ...] = (SET_ALIGNMENT,)
_BF16: tuple[Spellings, ...] = (
    ("m_grouped_bf16_gemm_nt_contiguous",),
    ("m_grouped_bf16_gemm_nn_contiguous",),
    ("m_grouped_bf16_gemm_nt_masked", "bf16_m_grouped_gemm_nt_masked"),
)
_FP8_FP4: tuple[Spellings, ...] = (
    ("fp8_fp4_gemm_nt", "fp8_gemm_nt"),
    ("m_grouped_fp8_fp4_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_contiguous"),
    ("m_grouped_fp8_fp4_gemm_nn_contiguous", "m_grouped_fp8_gemm_nn_contiguous"),
    (
        "m_grouped_fp8_fp4_gemm_nt_masked",
        "m_grouped_fp8_gemm_nt_masked",
        "fp8_m_grouped_gemm_nt_masked",
    ),
    ("per_token_cast_to_fp8",),
    ("transform_sf_into_required_layout",),
)
# fp4 weights need the entry that takes both formats, whose other spelling takes fp8 alone.
_FP4: tuple[Spellings, ...] = tuple(names[:1] for names in _FP8_FP4)
_MEGA: dict[int, tuple[Spellings, ...]] = {
    9: (
        ("get_symm_buffer_for_mega_moe",),
        ("transform_weights_for_mega_moe_sm90",),
        ("mega_moe_pre_dispatch_sm90",),
        ("fp8_mega_moe",),
    ),
    10: (
        ("get_symm_buffer_for_mega_moe",),
        ("transform_weights_for_mega_moe",),
        ("fp8_fp4_mega_moe",),
    ),
}


def needed_symbols(feature: Feature, major: int) -> tuple[Spellings, ...]:
    """Accepted spellings of each function that `feature` calls on SM`major`."""
    if feature == "mega":
        return _MEGA[major]
    return _COMMON + {"bf16": _BF16, "fp8_block": _FP8_FP4, "fp4": _FP4}[feature]


def resolve_symbols(
    module: ModuleType, source: str, feature: Feature, major: int
) -> Mapping[str, Function]:
    """The functions by their first spelling, and those of `OPTIONAL` that exist.

    Raises:
        DeepGemmUnavailableError: names every one that is missing, all together.
    """
    found: dict[str, Function] = {}
    missing = []
    for spellings in needed_symbols(feature, major):
        present = [name for name in spellings if callable(getattr(module, name, None))]
        if present:
            found[spellings[0]] = getattr(module, present[0])
        else:
            missing.append(" or ".join(spellings))
    if feature != "mega":
        optional = {name: getattr(module, name, None) for name in OPTIONAL}
        found |= {name: function for name, function in optional.items() if callable(function)}
    if missing:
        version = getattr(module, "__version__", "of unknown version")
        raise DeepGemmUnavailableError(
            f"{feature} on SM{major}0 needs functions that {source} {version} lacks: "
            f"{', '.join(missing)}. {_remedy(feature, major)}"
        )
    return found


def _remedy(feature: Feature, major: int) -> str:
    if feature == "mega" and major == 9:
        return "Mega MoE on SM90 is in the package sgl-deep-gemm: install it."
    return "Install a newer deep_gemm, or uninstall it so that vLLM's own copy is used."
