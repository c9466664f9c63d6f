"""The part of NKI 0.6 that this package's kernels use, in NumPy and stricter than the real thing.

Runs a kernel's own source on Trainium2's rules and counts what it would cost. What it leaves out
it does not have: a kernel that uses more fails here. ``ml_dtypes`` gives the number formats.
"""
