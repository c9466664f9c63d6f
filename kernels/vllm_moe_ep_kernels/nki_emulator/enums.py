"""Enumerations of ``nki.isa``: the members that the kernels use."""

from enum import Enum


class DgeMode(Enum):
    """Who makes a DMA's descriptors."""

    unknown = "unknown"
    hwdge = "hwdge"


class Engine(Enum):
    tensor = "tensor"
    vector = "vector"
    scalar = "scalar"
    gpsimd = "gpsimd"
    unknown = "unknown"
