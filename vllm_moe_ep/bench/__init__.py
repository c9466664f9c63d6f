"""One MoE layer's routed experts, measured: our ways beside the engine's own."""
