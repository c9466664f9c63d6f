"""What a vLLM server's log says: why it died, and which layers it runs."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_NUM_LINES = 8
_PREFIX = re.compile(
    r"^(\([^)]*pid=\d+\)\s*)?((INFO|WARNING|ERROR|DEBUG) \d\d-\d\d [\d:]+ \[[^\]]*\]\s?)?"
)
_CAUSE = re.compile(r"^([\w.]+(Error|Exception|Exit)\b.*|.*\berror: .*)$")
# What only reports that another process, whose own error is in the log too, has died.
_CONSEQUENCE = re.compile(r"Engine core initialization failed|WorkerProc initialization failed")
_REPLACED = re.compile(r"static-ep: replaced (\d+) of (\d+) .*")


@dataclass(frozen=True, slots=True)
class ReplacedLayers:
    """One process's report of its MoE layers; `text` is the line without vLLM's prefix."""

    num_replaced: int
    num_layers: int
    text: str


def replaced_layers(log: str) -> list[ReplacedLayers]:
    """The plugin's reports in `log`, one for each worker process that has loaded the model."""
    return [
        ReplacedLayers(int(match[1]), int(match[2]), match[0]) for match in _REPLACED.finditer(log)
    ]


def last_words(log: str) -> str:
    """The errors named in `log`, each once, with the text below them; else its last lines."""
    lines = [_PREFIX.sub("", line).rstrip() for line in log.splitlines()]
    lines = [line for line in lines if line.strip()]
    causes = list(_causes(lines))
    return "\n".join(f"  {line}" for line in causes[-_NUM_LINES:] or lines[-_NUM_LINES:])


def _causes(lines: list[str]) -> Iterable[str]:
    seen = set()
    for index, line in enumerate(lines):
        if not _CAUSE.match(line) or _CONSEQUENCE.search(line) or line in seen:
            continue
        seen.add(line)
        yield line
        yield from _continuation(lines[index + 1 :])


def _continuation(lines: list[str]) -> Iterable[str]:
    """Indented lines right below an error, such as pydantic's; at most three."""
    for line in lines[:3]:
        if not line.startswith("  ") or line.lstrip().startswith(("File ", "at ")):
            return
        yield line
