"""`TextArenaEnv` and `ReasoningGymEnv` of verifiers 0.1.8."""

from __future__ import annotations

from rolltree import environments as rooms

ReasoningGymEnv = rooms.ReasoningGymEnv
TextArenaEnv = rooms.TextArenaEnv
