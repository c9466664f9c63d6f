"""vllm-neuron, AWS's vLLM platform for Trainium; imports neither it nor vllm."""
