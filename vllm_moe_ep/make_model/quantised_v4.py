"""A small DeepSeek-V4 checkpoint in the published layout: FP4 experts, fp8 linears, bf16 rest.

It is not trained as a whole, and no language model. Embeddings, output head and final norm are
the trained DeepSeek-V3's. Its routed experts are pairs of that model's experts side by side, 64
different pairs a layer, and its shared expert is the pair of shared ones. Attention, routers,
hash table and hyper-connections, which that model has not, are random.
"""

import itertools
from typing import TYPE_CHECKING, Any

from .architecture_v4 import (
    COMPRESS_RATIOS,
    GROUPS,
    HEAD_DIM,
    INDEX_DIM,
    INDEX_HEADS,
    NUM_EXPERTS,
    NUM_HASH_LAYERS,
    NUM_HEADS,
    RANK,
    STREAMS,
    TOP_K,
)
from .quantised_v3 import Tensors, fp8_linear

if TYPE_CHECKING:
    import torch

# The experts' outputs are grown by this, since swiglu_limit makes them small: without it a
# wrong expert would hardly change the text.
_DOWN_GAIN = 16


def v4_tensors(v3_weights: Tensors, v3: dict[str, Any], seed: int) -> Tensors:
    """The checkpoint's tensors; scales are float8_e8m0fnu under X.scale, FP4 is int8.

    Args:
        v3_weights: the trained model's, any float dtype.
        v3: its config.json.
        seed: of everything random.
    """
    return _Builder(v3_weights, v3, seed).build()


class _Builder:
    def __init__(self, v3_weights: Tensors, v3: dict[str, Any], seed: int) -> None:
        import torch

        self._v3_weights = v3_weights
        self._v3 = v3
        self._hidden = v3["hidden_size"]
        self._generator = torch.Generator().manual_seed(seed)
        self._tensors: Tensors = {}

    def build(self) -> Tensors:
        for name, source in (
            ("embed.weight", "model.embed_tokens.weight"),
            ("head.weight", "lm_head.weight"),
            ("norm.weight", "model.norm.weight"),
        ):
            self._put(name, self._v3_weights[source])
        for layer, ratio in enumerate(COMPRESS_RATIOS):
            self._norm(f"layers.{layer}.attn_norm", self._hidden)
            self._norm(f"layers.{layer}.ffn_norm", self._hidden)
            self._attention(f"layers.{layer}.attn", ratio)
            self._router(f"layers.{layer}.ffn.gate", layer)
            self._experts(f"layers.{layer}.ffn", layer)
            num_mixes = (2 + STREAMS) * STREAMS
            self._hyper_connection(f"layers.{layer}.hc_attn", num_mixes, 3)
            self._hyper_connection(f"layers.{layer}.hc_ffn", num_mixes, 3)
        self._hyper_connection("hc_head", STREAMS, 1)
        return self._tensors

    def _attention(self, prefix: str, ratio: int) -> None:
        hidden, heads = self._hidden, NUM_HEADS * HEAD_DIM
        self._float32(f"{prefix}.attn_sink", (NUM_HEADS,), 1.0)
        self._linear(f"{prefix}.wq_a", RANK, hidden)
        self._linear(f"{prefix}.wq_b", heads, RANK)
        self._linear(f"{prefix}.wkv", HEAD_DIM, hidden)
        self._linear(f"{prefix}.wo_a", GROUPS * RANK, heads // GROUPS)
        self._linear(f"{prefix}.wo_b", hidden, GROUPS * RANK)
        self._norm(f"{prefix}.q_norm", RANK)
        self._norm(f"{prefix}.kv_norm", HEAD_DIM)
        if ratio:
            self._compressor(f"{prefix}.compressor", ratio, HEAD_DIM)
        if ratio == 4:
            self._compressor(f"{prefix}.indexer.compressor", ratio, INDEX_DIM)
            self._linear(f"{prefix}.indexer.wq_b", INDEX_HEADS * INDEX_DIM, RANK)
            weights = self._random((INDEX_HEADS, hidden), hidden**-0.5)
            self._put(f"{prefix}.indexer.weights_proj.weight", weights)

    def _compressor(self, prefix: str, ratio: int, head_dim: int) -> None:
        """Ratio 4 has overlapping windows, so everything but the norm is twice as wide."""
        width = head_dim * (2 if ratio == 4 else 1)
        self._float32(f"{prefix}.ape", (ratio, width), 0.5)
        self._norm(f"{prefix}.norm", head_dim)
        for name in ("wkv", "wgate"):
            weights = self._random((width, self._hidden), self._hidden**-0.5)
            self._put(f"{prefix}.{name}.weight", weights)

    def _router(self, prefix: str, layer: int) -> None:
        import torch

        self._put(
            f"{prefix}.weight", self._random((NUM_EXPERTS, self._hidden), 2 * self._hidden**-0.5)
        )
        if layer >= NUM_HASH_LAYERS:
            self._float32(f"{prefix}.bias", (NUM_EXPERTS,), 0.1)
            return
        scores = torch.rand(self._v3["vocab_size"], NUM_EXPERTS, generator=self._generator)
        self._tensors[f"{prefix}.tid2eid"] = scores.topk(TOP_K, dim=1).indices

    def _experts(self, prefix: str, layer: int) -> None:
        trained = self._trained_layers()
        everyone = [
            (source, expert) for source in trained for expert in range(self._v3["n_routed_experts"])
        ]
        pairs = list(itertools.combinations(everyone, 2))[layer::7][:NUM_EXPERTS]
        for number, pair in enumerate(pairs):
            for name, weight in self._side_by_side([f"{s}.experts.{e}" for s, e in pair]).items():
                self._fp4(f"{prefix}.experts.{number}.{name}", weight)
        shared = self._side_by_side([f"{source}.shared_experts" for source in trained[:2]])
        for name, weight in shared.items():
            self._fp8(f"{prefix}.shared_experts.{name}", weight)

    def _trained_layers(self) -> list[str]:
        first, last = self._v3["first_k_dense_replace"], self._v3["num_hidden_layers"]
        return [f"model.layers.{layer}.mlp" for layer in range(first, last)]

    def _side_by_side(self, sources: list[str]) -> Tensors:
        """w1 (gate) and w3 (up) of all sources above each other, w2 (down) beside each other."""
        import torch

        joined: Tensors = {}
        for name, part, dim in (
            ("w1", "gate_proj", 0),
            ("w3", "up_proj", 0),
            ("w2", "down_proj", 1),
        ):
            weights = [self._v3_weights[f"{source}.{part}.weight"] for source in sources]
            joined[name] = torch.cat(weights, dim)
        return {**joined, "w2": joined["w2"] * _DOWN_GAIN}

    def _hyper_connection(self, prefix: str, num_mixes: int, num_scales: int) -> None:
        width = STREAMS * self._hidden
        self._float32(f"{prefix}_fn", (num_mixes, width), width**-0.5)
        self._float32(f"{prefix}_base", (num_mixes,), 0.5)
        self._float32(f"{prefix}_scale", (num_scales,), 0.2)

    def _random(self, shape: tuple[int, ...], deviation: float) -> "torch.Tensor":
        import torch

        return torch.randn(shape, generator=self._generator) * deviation

    def _linear(self, name: str, n: int, k: int) -> None:
        self._fp8(name, self._random((n, k), k**-0.5))

    def _norm(self, name: str, width: int) -> None:
        self._put(f"{name}.weight", 1 + self._random((width,), 0.1))

    def _put(self, name: str, values: "torch.Tensor") -> None:
        import torch

        self._tensors[name] = values.to(torch.bfloat16)

    def _float32(self, name: str, shape: tuple[int, ...], deviation: float) -> None:
        self._tensors[name] = self._random(shape, deviation)

    def _fp8(self, name: str, weight: "torch.Tensor") -> None:
        self._tensors.update(fp8_linear(f"{name}.weight", "scale", weight, "fp8-ue8m0"))

    def _fp4(self, name: str, weight: "torch.Tensor") -> None:
        import torch

        from vllm_moe_ep.quant.cast import quantise
        from vllm_moe_ep.quant.formats import FP4_1X32

        stored = quantise(weight, FP4_1X32)
        self._tensors[f"{name}.weight"] = stored.values.view(torch.int8)
        self._tensors[f"{name}.scale"] = stored.scale.view(torch.float8_e8m0fnu)


def float_tensors(tensors: Tensors) -> Tensors:
    """What the quantised tensors stand for, in float32; the hash table stays int64."""
    import torch

    from vllm_moe_ep.quant.cast import dequantise
    from vllm_moe_ep.quant.formats import FP4_1X32, FP8_128X128
    from vllm_moe_ep.quant.weight import Quantised

    floats: Tensors = {}
    for name, tensor in tensors.items():
        scale = tensors.get(name.removesuffix("weight") + "scale")
        if name.endswith(".weight") and scale is not None:
            is_fp4 = tensor.dtype is torch.int8
            values = tensor.view(torch.uint8) if is_fp4 else tensor
            fmt = FP4_1X32 if is_fp4 else FP8_128X128
            floats[name] = dequantise(Quantised(values, scale, fmt.block_size))
        elif not name.endswith(".scale"):
            floats[name] = tensor if tensor.dtype is torch.int64 else tensor.to(torch.float32)
    return floats
