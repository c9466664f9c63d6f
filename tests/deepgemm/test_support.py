"""The whole table: device by feature by library state."""

import pytest

from vllm_moe_ep.deepgemm.support import FEATURES, Feature, LibraryState, decide

PRESENT = LibraryState("present", "deep_gemm 2.8.1")
ABSENT = LibraryState("absent", "deep_gemm is not installed")
BROKEN = LibraryState("broken", "deep_gemm fails to import: OSError: libcudart.so.13")
USE = "use"
EXPECTED = {
    (7, 5): ("triton", "marlin", "marlin", "auto"),
    (8, 0): ("triton", "marlin", "marlin", "auto"),
    (8, 6): ("triton", "marlin", "marlin", "auto"),
    (8, 9): ("triton", "triton", "marlin", "auto"),
    (9, 0): (USE, USE, "marlin", USE),
    (10, 0): (USE, USE, USE, USE),
    (10, 3): (USE, USE, USE, USE),
    (11, 0): ("triton", "triton", "marlin", "auto"),
    (12, 0): ("triton", "triton", "marlin", "auto"),
    (12, 1): ("triton", "triton", "marlin", "auto"),
}
CELLS = [
    (capability, feature, answer)
    for capability, answers in EXPECTED.items()
    for feature, answer in zip(FEATURES, answers, strict=True)
]
each_cell = pytest.mark.parametrize(("capability", "feature", "answer"), CELLS)


@each_cell
@pytest.mark.parametrize("library", [PRESENT, ABSENT, BROKEN], ids=lambda state: state.kind)
def test_cell(
    capability: tuple[int, int], feature: Feature, answer: str, library: LibraryState
) -> None:
    decision = decide([capability], feature, library)
    if answer == USE and library is PRESENT:
        assert decision.use and decision.text == "use"
        return
    assert not decision.use
    device = f"refuse: device of compute capability {capability[0]}.{capability[1]}, {feature}: "
    assert decision.text.startswith(device)
    if answer != USE:
        assert decision.text == f"{device}use --moe-backend {answer}"
    else:
        assert library.detail in decision.text and "--moe-backend auto" in decision.text
        assert ("install" if library is ABSENT else "repair") in decision.text


@pytest.mark.parametrize("capability", [(9, 1), (10, 1), (12, 2), (13, 0), (3, 7)])
@pytest.mark.parametrize("feature", FEATURES)
def test_a_capability_without_a_row_is_refused(
    capability: tuple[int, int], feature: Feature
) -> None:
    decision = decide([capability], feature, PRESENT)
    assert not decision.use
    assert "unknown, DeepGEMM serves 9.0, 10.0, 10.3" in decision.text


def test_mixed_devices_are_refused_with_each_of_them_named() -> None:
    decision = decide([(9, 0), (8, 0)], "bf16", PRESENT)
    assert not decision.use
    for words in ("device 0 is 9.0", "device 1 is 8.0", "CUDA_VISIBLE_DEVICES"):
        assert words in decision.text


def test_equal_devices_decide_as_one() -> None:
    assert decide([(9, 0)] * 8, "fp8_block", PRESENT).use


def test_no_device() -> None:
    decision = decide([], "bf16", PRESENT)
    assert not decision.use and "no CUDA device" in decision.text
