"""The work around grouped products on NVIDIA, in Triton; each has a reference of its name."""
