"""A run on more than one process: servers, vLLM, weights on their way, clusters."""
