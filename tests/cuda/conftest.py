"""Everything in this folder needs an NVIDIA GPU of compute capability 9 or 10."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10):
        return
    skip = pytest.mark.skip(reason="needs a Hopper or Blackwell GPU")
    for item in items:
        if "tests/cuda/" in str(item.path):
            item.add_marker(skip)
