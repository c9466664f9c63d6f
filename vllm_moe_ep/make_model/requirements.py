"""The packages that making a model needs, beyond the standard library."""

import importlib

from vllm_moe_ep.errors import UnsupportedError

_MODULES = ("torch", "transformers", "tokenizers", "safetensors", "tqdm")


def require_modules() -> None:
    """Import what making a model needs.

    Raises:
        UnsupportedError: some are missing; the text names all of them.
    """
    missing = []
    for name in _MODULES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            missing.append(name)
    if missing:
        raise UnsupportedError(
            "make-model trains with PyTorch and Hugging Face's libraries, but it cannot find "
            f"{', '.join(missing)}: run 'pip install {' '.join(missing)}', or install this package "
            "with its extra 'cpu' or 'cuda'."
        )
