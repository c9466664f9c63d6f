"""``nki.isa``, as far as the kernels use it."""

from vllm_moe_ep_kernels.nki_emulator.dma import dma_copy as dma_copy
from vllm_moe_ep_kernels.nki_emulator.elementwise import activation as activation
from vllm_moe_ep_kernels.nki_emulator.elementwise import memset as memset
from vllm_moe_ep_kernels.nki_emulator.elementwise import nc_stream_shuffle as nc_stream_shuffle
from vllm_moe_ep_kernels.nki_emulator.elementwise import (
    scalar_tensor_tensor as scalar_tensor_tensor,
)
from vllm_moe_ep_kernels.nki_emulator.elementwise import tensor_copy as tensor_copy
from vllm_moe_ep_kernels.nki_emulator.elementwise import (
    tensor_copy_predicated as tensor_copy_predicated,
)
from vllm_moe_ep_kernels.nki_emulator.elementwise import tensor_reduce as tensor_reduce
from vllm_moe_ep_kernels.nki_emulator.elementwise import tensor_scalar as tensor_scalar
from vllm_moe_ep_kernels.nki_emulator.elementwise import tensor_tensor as tensor_tensor
from vllm_moe_ep_kernels.nki_emulator.enums import DgeMode, Engine
from vllm_moe_ep_kernels.nki_emulator.matmul import nc_matmul as nc_matmul
from vllm_moe_ep_kernels.nki_emulator.matmul import nc_transpose as nc_transpose
from vllm_moe_ep_kernels.nki_emulator.registers import register_alloc as register_alloc
from vllm_moe_ep_kernels.nki_emulator.registers import register_load as register_load

dge_mode, engine = DgeMode, Engine
