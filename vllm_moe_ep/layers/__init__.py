"""The expert-parallel MoE layer, independent of any engine."""
