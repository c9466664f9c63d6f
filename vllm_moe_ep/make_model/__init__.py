"""Makes a small DeepSeek-V3 that has learned some Python, for demos and tests.

The imports below are cheap: PyTorch and Hugging Face's libraries load when `make_model` runs.
"""

from .cli import add_arguments, run
from .options import MakeModelOptions, ModelReport
from .pipeline import make_model

__all__ = ["MakeModelOptions", "ModelReport", "add_arguments", "make_model", "run"]
