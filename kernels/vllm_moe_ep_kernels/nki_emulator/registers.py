"""Registers of an engine's sequencer: they hold numbers known at run time alone."""

from typing import Any

from vllm_moe_ep_kernels.nki_emulator.rules import NkiRuleError, require


class VirtualRegister:
    """A 32-bit register. No arithmetic, no truth value, no use as a Python number."""

    def __init__(self, value: int | None = None) -> None:
        self._value = value

    @property
    def value(self) -> int:
        if self._value is None:
            raise NkiRuleError("A register is read before it was loaded.")
        return self._value

    def set(self, value: int) -> None:
        self._value = value

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("A register has no value while a kernel is traced: no if, no arithmetic.")

    __bool__ = __index__ = __int__ = _refuse
    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = _refuse
    __lt__ = __gt__ = __le__ = __ge__ = _refuse


def register_alloc(x: int | None = None) -> VirtualRegister:
    """A register, holding a constant where one is given."""
    return VirtualRegister(x)


def register_load(dst: VirtualRegister, src: Any) -> None:
    """The number of a 1-element int32 or uint32 tensor."""
    require(src.data.size == 1, f"A register holds one number, found {src.shape}.")
    require(src.data.dtype.kind in "iu", f"A register holds an integer, found {src.dtype}.")
    dst.set(int(src.read().reshape(-1)[0]))
