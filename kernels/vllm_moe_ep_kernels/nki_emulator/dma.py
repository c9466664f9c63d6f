"""DMA between HBM and SBUF."""

import math

from vllm_moe_ep_kernels.nki_emulator import core as cores
from vllm_moe_ep_kernels.nki_emulator import dtypes
from vllm_moe_ep_kernels.nki_emulator.counts import Transfer
from vllm_moe_ep_kernels.nki_emulator.enums import DgeMode
from vllm_moe_ep_kernels.nki_emulator.issue import issue
from vllm_moe_ep_kernels.nki_emulator.rules import require
from vllm_moe_ep_kernels.nki_emulator.storage import PSUM
from vllm_moe_ep_kernels.nki_emulator.tensor import Tensor


def dma_copy(dst: Tensor, src: Tensor, dge_mode: DgeMode = DgeMode.unknown) -> None:
    """Elements in order, from one shape to another of as many; a cast goes through fp32."""
    core = cores.current()
    _check(dst, src, dge_mode, core.in_loop)
    if not issue(f"dma {dge_mode.value}", "dma_copy", dst, src):
        return
    values = src.read().reshape(dst.shape)
    if dst.dtype != src.dtype:
        values = dtypes.from_float32(dtypes.to_float32(values), dst.dtype)
    if not src.is_on_chip:
        src.mark_read()
    dst.write(values)
    core.counts.transfers.append(_transfer(dst, src))
    core.counts.instructions["dma"] += 1


def _check(dst: Tensor, src: Tensor, mode: DgeMode, in_loop: bool) -> None:
    require(PSUM not in (dst.buffer, src.buffer), "DMA cannot reach PSUM.")
    require(dst.is_on_chip != src.is_on_chip, "DMA is emulated between HBM and SBUF, either way.")
    require(
        dst.data.size == src.data.size,
        f"DMA of {src.data.size} elements to {dst.data.size}.",
    )
    is_hardware = mode is DgeMode.hwdge
    require(
        not in_loop or is_hardware,
        "Inside a dynamic loop DMA must name dge_mode.hwdge: static descriptors cannot work.",
    )
    require(
        not is_hardware or dst.dtype == src.dtype,
        f"dge_mode.hwdge does not cast, found {src.dtype} to {dst.dtype}.",
    )
    is_dynamic = dst.is_dynamic or src.is_dynamic
    require(not is_dynamic or is_hardware, "A dynamic address needs dge_mode.hwdge.")
    partitions = (dst if dst.is_on_chip else src).shape[0]
    require(
        not is_dynamic or partitions == 1 or partitions % 16 == 0,
        f"A dynamic address needs 1 partition or a multiple of 16, found {partitions}.",
    )


def _transfer(dst: Tensor, src: Tensor) -> Transfer:
    hbm, chip = (src, dst) if dst.is_on_chip else (dst, src)
    num_bytes = hbm.data.size * hbm.dtype.itemsize
    chunk = min(_run_bytes(hbm, 0), _run_bytes(chip, 1) // chip.dtype.itemsize * hbm.dtype.itemsize)
    return Transfer(
        hbm.storage.name, hbm is src, num_bytes, num_bytes // chip.shape[0], max(1, chunk)
    )


def _run_bytes(tensor: Tensor, first_dim: int) -> int:
    """Bytes of the longest contiguous run, over dimensions from ``first_dim``."""
    run = tensor.dtype.itemsize
    for size, stride in reversed(
        list(zip(tensor.shape[first_dim:], tensor.data.strides[first_dim:], strict=True))
    ):
        if size == 1:
            continue
        if stride != run:
            break
        run *= size
    return min(run, math.prod(tensor.shape) * tensor.dtype.itemsize)
