"""The sizes of the layer that is measured."""

from dataclasses import dataclass

from vllm_moe_ep.errors import SettingsError

_LARGEST_SIZE = 2**20


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One rank's share of a layer.

    Attributes:
        num_experts: experts on this rank; every choice of a row is among them.
        top_k: experts per row.
        hidden_size: model width.
        width: of one expert.

    Raises:
        SettingsError: a size is out of range, or top_k exceeds num_experts.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    width: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} must be at least 1, found {getattr(self, name)}.")
            if getattr(self, name) > _LARGEST_SIZE:
                raise SettingsError(f"{name} must be at most {_LARGEST_SIZE}.")
        if self.top_k > self.num_experts:
            raise SettingsError(
                f"top_k is {self.top_k}, but this rank has {self.num_experts} experts: lower "
                "top_k or --ep-size."
            )

    @property
    def expert_numbers(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden_size * self.width
