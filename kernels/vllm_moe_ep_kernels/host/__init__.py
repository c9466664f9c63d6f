"""Implementations for the CPU."""
