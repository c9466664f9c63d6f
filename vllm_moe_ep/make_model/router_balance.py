"""Keeps the routed experts evenly used, without an auxiliary loss (DeepSeek-V3, section 2.1.2).

After each step every expert's selection bias moves by a fixed amount: up if the expert got less
than the mean load, down if it got more. The bias only takes part in the choice of experts, never
in their weights.
"""

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class RouterBalancer:
    """While entered, counts the tokens that each expert gets; `update` moves the biases."""

    def __init__(self, model: "PreTrainedModel") -> None:
        import torch

        routers: list[Any] = [
            module for module in model.modules() if hasattr(module, "e_score_correction_bias")
        ]
        self._routers = routers
        self._loads = [torch.zeros_like(router.e_score_correction_bias) for router in routers]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Self:
        for router, load in zip(self._routers, self._loads, strict=True):
            self._handles.append(router.register_forward_hook(_counting_hook(load)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def update(self, rate: float) -> None:
        """Move each bias by `rate` against its expert's load error, and count from zero again."""
        for router, load in zip(self._routers, self._loads, strict=True):
            router.e_score_correction_bias.add_((load.mean() - load).sign(), alpha=rate)
            load.zero_()


def _counting_hook(load: "torch.Tensor") -> Callable[..., None]:
    """A forward hook that adds a router's choices to `load`, float32 [num_experts]."""

    def count(_router: object, _inputs: object, outputs: tuple["torch.Tensor", ...]) -> None:
        topk_ids = outputs[2]
        load.add_(topk_ids.flatten().bincount(minlength=len(load)))

    return count
