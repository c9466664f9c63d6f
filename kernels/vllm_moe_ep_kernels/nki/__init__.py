"""Kernels for Trainium2: block-quantised linears, SwiGLU and whole experts.

Kernels are plain functions of ``nl`` and ``nisa``, see ``nki_api``. Weights stay in the layout that
``prepare`` gives them at load.
"""
