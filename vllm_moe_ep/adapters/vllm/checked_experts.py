"""vLLM's `RoutedExperts` with an eye on what its weight loader is given."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from vllm_moe_ep.adapters.vllm.load_check import (
    CHECKED_FORMATS,
    LoadCheck,
    Piece,
    pieces_of,
    require_complete,
)

logger = init_logger("vllm.vllm_moe_ep")

_layers: "weakref.WeakSet[CheckedRoutedExperts]" = weakref.WeakSet()
"""All layers of this process, of any engine."""


class CheckedRoutedExperts(RoutedExperts):
    """Refuses to be used before each weight of each local expert has been loaded.

    Attributes:
        load_check: what has been loaded; None where that is not followed: for dummy weights, and
            for loaders of vLLM that fill the parameters by themselves.
    """

    load_check: LoadCheck | None
    _expert_map: Tensor | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        self.load_check = None
        # Layers of one engine share this object.
        self._engine = weakref.ref(vllm_config.compilation_config)
        names = getattr(self.quant_method, "parameter_names", None)
        load_format = str(vllm_config.load_config.load_format)
        if names is None or vllm_config.model_config is None or load_format == "dummy":
            return
        if load_format not in CHECKED_FORMATS:
            logger.info_once(
                "static-ep: weights of the load format %s are not checked for completeness",
                load_format,
            )
            return
        wanted = pieces_of(names, self._local_experts())
        self.load_check = LoadCheck(self.layer_name, vllm_config.model_config.model, wanted)
        _layers.add(self)

    def _local_experts(self) -> Iterable[int]:
        if self._expert_map is None:
            return range(self.global_num_experts)
        local = self._expert_map.tolist()
        return [expert for expert, place in enumerate(local) if place >= 0]

    def weight_loader(  # type: ignore[override]
        self,
        param: Any,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
        **kwargs: Any,
    ) -> bool | None:
        """Load one matrix of one expert, as vLLM does, and note it."""
        piece = self._piece(param, shard_id, expert_id)
        # While weights are replaced, vLLM first counts them with parameters that hold nothing.
        is_counted = param.device.type == "meta"
        if self.load_check is not None and piece is not None:
            if is_counted:
                self.load_check.begin_again()
            self.load_check.examine(piece, param, loaded_weight)
        load: Any = super().weight_loader
        result: bool | None = load(
            param, loaded_weight, weight_name, shard_id, expert_id, return_success, **kwargs
        )
        if self.load_check is not None and piece is not None and not is_counted:
            self.load_check.note(piece)
        return result

    def _piece(self, param: Any, shard: str, expert: int) -> Piece | None:
        """Which one is loaded; None for an expert of another rank."""
        if self.load_check is None:
            return None
        name = next((name for name, held in self._parameters.items() if held is param), None)
        piece = Piece(name or "", expert, shard)
        return piece if self.load_check.is_wanted(piece) else None

    def require_loaded(self) -> None:
        """To be called before the layer is built over its parameters.

        At the first load it looks at all layers of the engine, so that one error names all that
        is missing.

        Raises:
            CheckpointError: weights are missing, or were loaded twice; lists them.
        """
        if self.load_check is None or not self.load_check.is_loading:
            return
        others = [
            layer.load_check
            for layer in _layers
            if layer.load_check is not None and layer._engine() is self._engine()
        ]
        waiting = [check for check in others if check.is_loading and check is not self.load_check]
        first = [check for check in waiting if check.is_first and self.load_check.is_first]
        require_complete([self.load_check, *first])
        self.load_check.finish()
