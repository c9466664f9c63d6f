"""Registers of an engine's sequencer: they hold numbers known at run time alone."""

from typing import Any

from vllm_moe_ep_kernels.nki_emulator import core as cores
from vllm_moe_ep_kernels.nki_emulator.core import Core
from vllm_moe_ep_kernels.nki_emulator.rules import require
from vllm_moe_ep_kernels.nki_emulator.trace import Instruction


class VirtualRegister:
    """A 32-bit register. No arithmetic, no truth value, no use as a Python number.

    Attributes:
        place: its name in traces.
    """

    def __init__(self, core: Core, value: int | None = None) -> None:
        self.core = core
        self.scope = core.scope
        self.place = f"register {core.scope.next_place()}"
        self._value = value
        self._is_loaded = value is not None

    def number(self) -> int:
        """What it holds; 0 while instructions are only traced."""
        self.check_usable()
        require(self._is_loaded, "A register is read before it was loaded.")
        return self._value or 0

    def load(self, value: int | None) -> None:
        """Take a number, or None where none is known yet."""
        self.check_usable()
        require(
            self.scope is cores.current().scope,
            "A register from outside a loop body is loaded in it: keep what passes from trip to "
            "trip in SBUF.",
        )
        self._value, self._is_loaded = value, True

    def check_usable(self) -> None:
        """That it is this core's, and that the loop body it was made in still runs."""
        require(self.core is cores.current(), "A register belongs to another core.")
        require(
            self.scope.is_alive,
            "A register or loop index was made in a loop body and is used outside it, or in "
            "another trip.",
        )

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("A register has no value while a kernel is traced: no if, no arithmetic.")

    __bool__ = __index__ = __int__ = _refuse
    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = _refuse
    __lt__ = __gt__ = __le__ = __ge__ = _refuse


def register_alloc(x: int | None = None) -> VirtualRegister:
    """A register, holding a constant where one is given."""
    register = VirtualRegister(cores.current(), x)
    _trace("register_alloc", register.place, repr(x))
    return register


def register_load(dst: VirtualRegister, src: Any) -> None:
    """The number of a 1-element int32 or uint32 tensor."""
    core = cores.current()
    require(src.data.size == 1, f"A register holds one number, found {src.shape}.")
    require(src.data.dtype.kind in "iu", f"A register holds an integer, found {src.dtype}.")
    src.storage.check_usable(core)
    dst.load(None if core.is_dry else int(src.read().reshape(-1)[0]))
    _trace("register_load", dst.place, src.traced())


def _trace(op: str, *operands: Any) -> None:
    cores.current().scope.trace.append(Instruction("sequencer", op, operands))
