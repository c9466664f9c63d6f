"""The few-row kernels on the GPU: the tests of tests/kernels, which pick the device."""

from tests.kernels.test_few_rows_combine import *  # noqa: F403
from tests.kernels.test_few_rows_down import *  # noqa: F403
from tests.kernels.test_few_rows_gate_up import *  # noqa: F403
from tests.kernels.test_few_rows_plan import *  # noqa: F403
