"""Base of the DeepGEMM layer: toolkit and library search, what runs where, scales and layouts."""
