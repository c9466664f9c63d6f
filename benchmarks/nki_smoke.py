"""Linears of every format by the NKI kernels, compared with the torch host path.

On CPU tensors (the default) the kernels run in NKI's simulator where it is installed, else in the
emulator; with `--device neuron` on the chip, where the time per call is printed too. Exit status 1
if a result is off.
"""

import argparse
import sys
import time

import torch
from torch import Tensor

from vllm_moe_ep.quant.cast import quantise
from vllm_moe_ep.quant.formats import FORMATS
from vllm_moe_ep_kernels.host.linears import HostLinears
from vllm_moe_ep_kernels.nki.launch import has_simulator
from vllm_moe_ep_kernels.nki.linears import NkiLinears

NAMES = ("fp8_128x128", "fp8_128x128_ue8m0", "fp8_1x32_ue8m0", "fp4_1x32")
LIMIT = 1e-2
MAX_E4M3_IEEE = 240.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu or neuron")
    parser.add_argument("--cores", type=int, default=2, help="physical cores of a logical core")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--size", type=int, nargs=2, default=[512, 512], metavar=("N", "K"))
    parser.add_argument("--repeat", type=int, default=20, help="timed calls, on a device only")
    options = parser.parse_args()
    if options.device == "cpu":
        print("simulator of NKI" if has_simulator() else "emulator: NKI is not installed")
    worst = max(check(name, rows, options) for name in NAMES for rows in options.rows)
    print(f"worst rel-L2 {worst:.2e}, limit {LIMIT:g}")
    return 0 if worst <= LIMIT else 1


def check(name: str, num_rows: int, options: argparse.Namespace) -> float:
    """rel-L2 of the gated and the plain kernel against the host path, and a printed line."""
    n, k = options.size
    torch.manual_seed(0)
    stored = quantise(torch.randn(1, n, k) / k**0.5, FORMATS[name])
    rows = torch.randn(num_rows, k).to(torch.bfloat16)
    host, nki = HostLinears(MAX_E4M3_IEEE), NkiLinears(options.cores, options.device)
    parts = (stored.values, stored.scale, stored.block_size)
    expected = host.linear(rows, host.prepare(*parts), 0)
    weight = nki.prepare(*parts)
    on_device = rows.to(options.device)
    open_gate, closed_gate = (
        torch.tensor([[flag]], dtype=torch.int32, device=options.device) for flag in (1, 0)
    )
    results = [
        nki.linear(on_device, weight, 0),
        nki.linear_gated(on_device, weight, 0, open_gate),
    ]
    error = max(rel_l2(result.cpu(), expected) for result in results)
    if nki.linear_gated(on_device, weight, 0, closed_gate).cpu().any():
        error = float("inf")
    took = ""
    if options.device != "cpu":
        times = [timed(nki, on_device, weight, gate, options) for gate in (open_gate, closed_gate)]
        took = f", {times[0]:.1f} us open, {times[1]:.1f} us closed"
    print(f"{name} {n}x{k}, {num_rows} rows: rel-L2 {error:.2e}{took}")
    return error


def timed(
    nki: NkiLinears, rows: Tensor, weight: object, flag: Tensor, options: argparse.Namespace
) -> float:
    """Microseconds per gated call, launch included."""
    start = time.perf_counter()
    for _ in range(options.repeat):
        result = nki.linear_gated(rows, weight, 0, flag)  # type: ignore[arg-type]
    result.cpu()
    return (time.perf_counter() - start) * 1e6 / options.repeat


def rel_l2(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


if __name__ == "__main__":
    sys.exit(main())
