"""The times as curves, log-log, one line per way and one panel per format."""

from collections.abc import Sequence
from pathlib import Path

from vllm_moe_ep.bench.way import Row
from vllm_moe_ep.errors import SettingsError, UnsupportedError


def check_plotting(file: Path) -> None:
    """Before anything is measured.

    Raises:
        SettingsError: `file` is a folder, or there is no folder to put it into.
        UnsupportedError: matplotlib is not installed.
    """
    if file.is_dir() or not file.parent.is_dir():
        raise SettingsError(f"--plot {file} must be a new file in a folder that exists.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"--plot needs matplotlib, which does not import ({error}): pip install matplotlib, "
            "or leave --plot out."
        ) from error


def plot(rows: Sequence[Row], file: Path, title: str) -> None:
    """Write the curves to `file`; its ending says in which format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    forms = list(dict.fromkeys(row.form for row in rows))
    figure, panels = pyplot.subplots(
        1, len(forms), figsize=(6 * len(forms), 5), squeeze=False, sharey=True
    )
    for form, panel in zip(forms, panels[0], strict=True):
        for name, points in curves(rows, form).items():
            style = "k--" if name == "floor" else "o-"
            panel.loglog(*zip(*points, strict=True), style, base=2, label=name)
        panel.set(title=form, xlabel="tokens", ylabel="microseconds")
        panel.legend()
        panel.grid(visible=True, which="both", alpha=0.3)
    figure.suptitle(title)
    figure.savefig(file, bbox_inches="tight")
    pyplot.close(figure)


def curves(rows: Sequence[Row], form: str) -> dict[str, list[tuple[int, float]]]:
    """(tokens, microseconds) by way, and of the floor, sorted by tokens; failures are left out."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in sorted(rows, key=lambda row: row.num_tokens):
        if row.form != form:
            continue
        for name, result in row.results.items():
            if result.us is not None and result.failure is None:
                found.setdefault(name, []).append((row.num_tokens, result.us))
        if row.floor_us is not None:
            found.setdefault("floor", []).append((row.num_tokens, row.floor_us))
    return found
