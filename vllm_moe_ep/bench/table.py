"""Rows as text and as JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

from vllm_moe_ep.bench.way import OURS, Row, Ways

_MIB = 2**20


def header(ways: Ways) -> str:
    """Column names: times in microseconds, what follows from ours, memory of ours and theirs."""
    ratios = ["vs_best", "vs_auto"] if ways.stock else []
    memory = ["MiB", *(f"{name}_MiB" for name in ways.stock)]
    return _line(
        ["format", "tokens", "chosen", "floor", *ways.by_name, *ratios, "TB/s", "TFLOP/s", *memory]
    )


def lines(row: Row, ways: Ways) -> Iterator[str]:
    """The row, and a line for each way that failed."""
    ours = row.results[OURS]
    cells: list[object] = [row.form, row.num_tokens, row.chosen, _rounded(row.floor_us, 1)]
    cells += [_rounded(result.us, 1) for result in row.results.values()]
    if ways.stock:
        cells += [_rounded(row.ratio(names), 3) for names in (ways.stock, ways.stock[:1])]
    cells += [_rounded(value, 2) for value in (_rate(row.weight_bytes, ours.us, 1e12),)]
    cells += [_rounded(_rate(row.flops, ours.us, 1e12), 2)]
    cells += [
        _rounded(_scaled(row.results[name].workspace_bytes), 1) for name in (OURS, *ways.stock)
    ]
    yield _line(cells)
    for name, result in row.results.items():
        if result.failure is not None:
            yield f"    {name}: {result.failure}"


def as_json(row: Row, ways: Ways) -> dict[str, Any]:
    """The row for `json.dumps`: times in microseconds, bytes and flops as they are."""
    ours = row.results[OURS].us
    return {
        "format": row.form,
        "tokens": row.num_tokens,
        "chosen": row.chosen,
        "floor_us": row.floor_us,
        "weight_bytes": row.weight_bytes,
        "flops": row.flops,
        "tb_per_s": _rate(row.weight_bytes, ours, 1e12),
        "tflop_per_s": _rate(row.flops, ours, 1e12),
        "vs_best": row.ratio(ways.stock),
        "vs_auto": row.ratio(ways.stock[:1]),
        "ways": {
            name: {
                "us": result.us,
                "error": result.error,
                "workspace_bytes": result.workspace_bytes,
                "failure": result.failure,
            }
            for name, result in row.results.items()
        },
    }


def _rate(amount: int, us: float | None, unit: float) -> float | None:
    return None if us is None else amount / (us * 1e-6) / unit


def _scaled(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / _MIB


def _rounded(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _line(cells: Sequence[object]) -> str:
    return " ".join(f"{cell!s:>12}" for cell in cells)
