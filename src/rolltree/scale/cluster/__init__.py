"""One run on several processes or machines: rollout workers, engines and trainer ranks.

Every role is a plain process that speaks HTTP. The driver starts the roles, restarts those that
end, reports stalls, and tells roles each other's addresses; the head, rank 0 of the trainer, holds
the store.
"""
