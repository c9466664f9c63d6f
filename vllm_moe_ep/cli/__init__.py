"""The console script `vllm-moe-ep`."""
