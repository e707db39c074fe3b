"""One run on several processes or machines: rollout workers, engines and trainer ranks.

Every role is a plain process that speaks HTTP. The driver starts them, restarts what ends, names
what stalls, and is where they find each other; the head, rank 0 of the trainer, holds the store.
"""
