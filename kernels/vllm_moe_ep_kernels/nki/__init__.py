"""Kernels for Trainium2: block-quantised linears, SwiGLU and whole experts.

Kernels are plain functions of ``api.nl`` and ``api.nisa``: NKI where it is installed, the emulator
elsewhere. Weights stay in the layout that ``prepare`` gives them at load.
"""
