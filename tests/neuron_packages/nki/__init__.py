"""A stand-in of NKI that can be found; it has no simulator, so the emulator is used."""
