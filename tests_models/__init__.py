"""Every causal language model architecture of transformers, tiny: what rolltree does with it."""
