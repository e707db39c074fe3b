"""Protocols: the loops between agents and worlds.

A protocol plays one episode and returns its rollouts.
"""

from rolltree.protocols.budget import Budget, BudgetedClient
from rolltree.protocols.delegation import DelegatingProtocol, SubAgent, delegate_tool
from rolltree.protocols.episode import EpisodeContext, Recording, RolloutBuilder, open_world
from rolltree.protocols.multi_agent import MultiAgentSyncProtocol, Opponent, TurnProtocol
from rolltree.protocols.player import ExternalToolHandler
from rolltree.protocols.single import AgentSource, InteractionProtocol, SingleAgentProtocol

SingleAgentSyncProtocol = SingleAgentProtocol
"""Another name for `SingleAgentProtocol`."""
MultiAgentProtocol = MultiAgentSyncProtocol
"""Another name for `MultiAgentSyncProtocol`."""

__all__ = [
    "AgentSource",
    "Budget",
    "DelegatingProtocol",
    "ExternalToolHandler",
    "InteractionProtocol",
    "BudgetedClient",
    "MultiAgentProtocol",
    "MultiAgentSyncProtocol",
    "Opponent",
    "Recording",
    "RolloutBuilder",
    "EpisodeContext",
    "SingleAgentProtocol",
    "SingleAgentSyncProtocol",
    "SubAgent",
    "TurnProtocol",
    "delegate_tool",
    "open_world",
]
