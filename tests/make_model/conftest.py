"""Models that several tests read; each is made once."""

from pathlib import Path

import pytest

from vllm_moe_ep.make_model import MakeModelOptions, ModelReport, make_model


@pytest.fixture(scope="session")
def trained_report(tmp_path_factory: pytest.TempPathFactory) -> ModelReport:
    """A model after two steps."""
    directory = tmp_path_factory.mktemp("made") / "trained"
    return make_model(MakeModelOptions(directory, num_steps=2, num_threads=1, show_progress=False))


@pytest.fixture(scope="session")
def random_report(tmp_path_factory: pytest.TempPathFactory) -> ModelReport:
    """An untrained model in bfloat16."""
    directory = tmp_path_factory.mktemp("made") / "random"
    return make_model(
        MakeModelOptions(
            directory, random=True, weight_dtype="bfloat16", num_threads=1, show_progress=False
        )
    )


@pytest.fixture
def trained_directory(trained_report: ModelReport) -> Path:
    return trained_report.directory
