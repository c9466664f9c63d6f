"""The demo, and what it is made of: a `vllm serve` process and a client for its OpenAI API."""
