"""What a kernel issued, to compare trips of a loop, and cores.

The device compiles a kernel once: a loop's body is traced once and repeated, and both cores of a
logical core run one program. So nothing may differ but what a register holds, and between cores
the places in HBM that their numbers choose.
"""

from collections.abc import Sequence
from typing import NamedTuple

from vllm_moe_ep_kernels.nki_emulator.rules import NkiRuleError


class View(NamedTuple):
    """A tensor operand.

    Attributes:
        place: the allocation, by when it was made; an input's name.
        dtype, shape, strides: of the view; strides in bytes.
        chosen_by: the register or tensor that a dynamic address is made with, or empty.
        is_hbm: whether it lies in HBM.
        offset: bytes from the start of the allocation, without the dynamic part.
    """

    place: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    chosen_by: str
    is_hbm: bool
    offset: int


class Instruction(NamedTuple):
    """One instruction, or a loop with the instructions of its body.

    Attributes:
        engine: which engine runs it; "dma" with its mode, or "loop".
        op: its name and operators.
        operands: tensors, and immediates as text.
        body: of a loop.
    """

    engine: str
    op: str
    operands: tuple[View | str, ...]
    body: tuple["Instruction", ...] = ()


def check_same(
    first: Sequence[Instruction], second: Sequence[Instruction], rule: str, other_hbm: bool = False
) -> None:
    """That two traces are equal; with ``other_hbm`` offsets in HBM may differ.

    Raises:
        NkiRuleError: with the rule, and the first two instructions that differ.
    """
    for number, (left, right) in enumerate(zip(first, second, strict=False)):
        if left == right or (other_hbm and _without_offsets(left) == _without_offsets(right)):
            continue
        if left[:3] == right[:3]:
            check_same(left.body, right.body, rule, other_hbm)
        raise NkiRuleError(f"{rule} Instruction {number}: {_text(left)}; then {_text(right)}.")
    if len(first) != len(second):
        raise NkiRuleError(f"{rule} {len(first)} instructions; then {len(second)}.")


def _without_offsets(instruction: Instruction) -> Instruction:
    operands = tuple(
        operand._replace(offset=0) if isinstance(operand, View) and operand.is_hbm else operand
        for operand in instruction.operands
    )
    body = tuple(_without_offsets(inner) for inner in instruction.body)
    return Instruction(instruction.engine, instruction.op, operands, body)


def _text(instruction: Instruction) -> str:
    operands = ", ".join(
        operand
        if isinstance(operand, str)
        else f"{operand.place}[{operand.offset}] {list(operand.shape)} {operand.dtype}"
        for operand in instruction.operands
    )
    return f"{instruction.engine} {instruction.op} ({operands})"
