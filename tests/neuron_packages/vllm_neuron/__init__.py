"""A stand-in of vllm-neuron: the names and signatures that the adapter relies on, no more."""
