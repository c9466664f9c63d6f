"""The Triton row kernels on the GPU: the tests of tests/kernels, which pick the device."""

from tests.kernels.test_combine_rows import *  # noqa: F403
from tests.kernels.test_plan_rows import *  # noqa: F403
from tests.kernels.test_scatter_rows import *  # noqa: F403
from tests.kernels.test_swiglu_rows import *  # noqa: F403
