"""Kernels of the MoE layer: plain torch references and one package per device.

A kernel, its reference and its test share a file name and a signature. Nothing here imports
``vllm_moe_ep``; ``reference`` imports torch and its own modules alone.
"""
