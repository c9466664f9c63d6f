"""What the loader would decide in this process, for people: every answer, no exception."""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from vllm_moe_ep.deepgemm import loading
from vllm_moe_ep.deepgemm.sources import absent, find_source
from vllm_moe_ep.deepgemm.support import FEATURES, Capability, Feature
from vllm_moe_ep.deepgemm.toolkit import find_toolkit
from vllm_moe_ep.deepgemm.unavailable import DeepGemmUnavailableError

_REFUSED = "refuse: "


@dataclass(frozen=True, slots=True)
class DeepGemmReport:
    """Each answer in words.

    Attributes:
        toolkit: the CUDA toolkit and what told its version, or why there is none.
        has_toolkit: which of the two.
        library: the source of deep_gemm, or that there is none.
        features: per feature "use: ..." with the functions found, or "refuse: ...".
    """

    toolkit: str
    has_toolkit: bool
    library: str
    features: dict[Feature, str]

    def problems(self, features: Sequence[Feature]) -> list[str]:
        """Why none of `features` is served, each reason once; empty if one is."""
        answers = [self.features[feature] for feature in features]
        if not all(answer.startswith(_REFUSED) for answer in answers):
            return []
        reasons = [answer.removeprefix(_REFUSED) for answer in answers]
        # Without a device the loader stops before the toolkit, which may be a second obstacle.
        reasons += [] if self.has_toolkit else [self.toolkit]
        return list(dict.fromkeys(reasons))


def examine(
    capabilities: Sequence[Capability], environ: MutableMapping[str, str]
) -> DeepGemmReport:
    """Ask the loader for every feature; imports the library only where a device could use it.

    Args:
        environ: the process's own, in which the loader sets what the library reads.
    """
    toolkit, has_toolkit = _toolkit(environ)
    return DeepGemmReport(
        toolkit=toolkit,
        has_toolkit=has_toolkit,
        library=find_source() or absent(use_hub=False).detail,
        features={feature: _feature(feature, capabilities, environ) for feature in FEATURES},
    )


def _toolkit(environ: MutableMapping[str, str]) -> tuple[str, bool]:
    try:
        toolkit = find_toolkit(environ)
    except DeepGemmUnavailableError as error:
        return str(error), False
    version = f"{toolkit.version} in {toolkit.root} ({toolkit.origin})"
    return f"{version}; told by {toolkit.version.source}", True


def _feature(
    feature: Feature, capabilities: Sequence[Capability], environ: MutableMapping[str, str]
) -> str:
    try:
        loaded = loading.load(feature, capabilities, environ)
    except DeepGemmUnavailableError as error:
        return f"{_REFUSED}{error}"
    return f"use: {loaded.description} with {', '.join(loaded.functions)}"
