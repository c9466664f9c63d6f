"""What the static-shape layer would cost on ranks that are not here: memory, bytes, latency."""
