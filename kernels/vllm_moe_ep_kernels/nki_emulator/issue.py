"""Issuing an instruction: its operands are checked, and it enters the trace."""

from typing import Any

from vllm_moe_ep_kernels.nki_emulator import core as cores
from vllm_moe_ep_kernels.nki_emulator.tensor import Tensor
from vllm_moe_ep_kernels.nki_emulator.trace import Instruction


def issue(engine: str, op: str, dst: Tensor, *operands: Any) -> bool:
    """Whether to compute a result too: not while a kernel or a loop's body is only traced.

    Args:
        engine, op: as ``Instruction`` has them.
        dst: what is written.
        operands: tensors, and immediates of any kind.
    """
    core = cores.current()
    for operand in (dst, *operands):
        if isinstance(operand, Tensor):
            operand.storage.check_usable(core)
    dst.check_writable()
    traced = [part.traced() if isinstance(part, Tensor) else repr(part) for part in operands]
    core.scope.trace.append(Instruction(engine, op, (dst.traced(), *traced)))
    return not core.is_dry
