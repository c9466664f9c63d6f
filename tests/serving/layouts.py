"""The ways to spread ranks that are served for real."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
MAX_MODEL_LEN = 1024

STOCK_TP1: tuple[str, ...] = ()
STOCK_TP2 = ("-tp", "2")


@dataclass(frozen=True)
class Layout:
    """A server with static-ep; `num_ranks` processes hold experts."""

    name: str
    flags: tuple[str, ...]
    num_ranks: int


def _config(name: str) -> tuple[str, str]:
    return ("--config", str(CONFIGS / name))


# vLLM's default custom ops compute in bfloat16 even in a float32 model; torch.compile replaces
# them, and eager mode does where they are all switched off.
_EAGER = ("--enforce-eager", "--compilation-config", '{"custom_ops": ["none"]}')

LAYOUTS = (
    Layout("tp1", ("--moe-backend", "static-ep"), 1),
    Layout("tp2-ep", _config("cpu-tp2-ep.yaml"), 2),
    Layout("tp2-ep-eager", (*_config("cpu-tp2-ep.yaml"), *_EAGER), 2),
    Layout("dp2-ep", _config("cpu-dp2-ep.yaml"), 2),
    Layout("dp2-tp2-ep", _config("cpu-dp2-tp2-ep.yaml"), 4),
)
