"""The physical core that a kernel runs on."""

from dataclasses import dataclass, field

from vllm_moe_ep_kernels.nki_emulator import trainium2
from vllm_moe_ep_kernels.nki_emulator.counts import Counts
from vllm_moe_ep_kernels.nki_emulator.rules import NkiRuleError, require


@dataclass(eq=False, slots=True)
class Scope:
    """The kernel itself, or one trip of a dynamic loop; what it allocates ends with it."""

    is_alive: bool = True
    trace: list[str] = field(default_factory=list)


class Core:
    """State of one core: what is allocated, which loops are open, what was counted."""

    def __init__(self, index: int, num_cores: int) -> None:
        self.index = index
        self.num_cores = num_cores
        self.counts = Counts()
        self.scopes = [Scope()]
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
