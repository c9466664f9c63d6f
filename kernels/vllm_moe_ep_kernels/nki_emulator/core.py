"""The physical core that a kernel runs on."""

from dataclasses import dataclass, field

from vllm_moe_ep_kernels import trainium2
from vllm_moe_ep_kernels.nki_emulator.counts import Counts
from vllm_moe_ep_kernels.nki_emulator.rules import NkiRuleError, require
from vllm_moe_ep_kernels.nki_emulator.trace import Instruction


@dataclass(eq=False, slots=True)
class Scope:
    """The kernel itself, or one trip of a dynamic loop; what it makes ends with it."""

    depth: int = 0
    is_alive: bool = True
    trace: list[Instruction] = field(default_factory=list)
    num_made: int = 0

    def next_place(self) -> str:
        """A name for a tensor or register, the same in every trip and on every core."""
        self.num_made += 1
        return f"{self.depth}.{self.num_made}"


class Core:
    """State of one core: what is allocated, which loops are open, what was counted.

    Attributes:
        is_dry: whether instructions are checked and traced, but nothing is computed or counted.
        traces_per_loop: how often a loop's body is traced before its trips.
    """

    def __init__(self, index: int, num_cores: int, is_dry: bool = False) -> None:
        self.index = index
        self.num_cores = num_cores
        self.counts = Counts()
        self.scopes = [Scope()]
        self.is_dry = is_dry
        # As a compiler does; and once more than that where it is compared with one.
        self.traces_per_loop = 1 if is_dry else 2
        self._sbuf_bytes = 0
        self._psum_banks = 0

    @property
    def scope(self) -> Scope:
        return self.scopes[-1]

    @property
    def in_loop(self) -> bool:
        return len(self.scopes) > 1

    def take_sbuf(self, num_bytes: int) -> None:
        self._sbuf_bytes += num_bytes
        limit = trainium2.SBUF_BYTES_PER_PARTITION
        require(
            self._sbuf_bytes <= limit,
            f"SBUF: {self._sbuf_bytes} bytes a partition live at once, of {limit}.",
        )
        self.counts.peak_sbuf_bytes = max(self.counts.peak_sbuf_bytes, self._sbuf_bytes)

    def take_psum(self, num_banks: int) -> None:
        self._psum_banks += num_banks
        limit = trainium2.NUM_PSUM_BANKS
        require(
            self._psum_banks <= limit, f"PSUM: {self._psum_banks} banks live at once, of {limit}."
        )
        self.counts.peak_psum_banks = max(self.counts.peak_psum_banks, self._psum_banks)

    def release(self, sbuf_bytes: int, psum_banks: int) -> None:
        self._sbuf_bytes -= sbuf_bytes
        self._psum_banks -= psum_banks


_running: list[Core] = []


def current() -> Core:
    if not _running:
        raise NkiRuleError("NKI calls work inside a kernel run by simulate() only.")
    return _running[-1]


def enter(core: Core) -> None:
    _running.append(core)


def leave() -> None:
    _running.pop()
