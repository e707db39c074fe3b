"""rolltree: reinforcement learning of LLM agents on the exact tokens the engine saw and sampled.

The package loads its public names on first use, so `import rolltree` costs no torch and no web
server. It holds no behaviour of its own; the rooms do.
"""
