"""Bridges between the engine-independent layers and serving engines."""
