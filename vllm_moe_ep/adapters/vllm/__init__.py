"""The vLLM adapter: the only package here that imports vllm.

`plugin.install` hooks vLLM's extension points; each hook is one module and is listed in
`docs/patches.md` with its reason and the condition for its removal.
"""
