"""Protocols: the loops between agents and worlds.

A protocol plays one episode and returns its rollouts.
"""

from rolltree.agents.protocols.budget import Budget, BudgetedClient
from rolltree.agents.protocols.delegation import DelegatingProtocol, SubAgent, delegate_tool
from rolltree.agents.protocols.episode import EpisodeContext, Recording, RolloutBuilder, open_world
from rolltree.agents.protocols.multi_agent import MultiAgentSyncProtocol, Opponent, TurnProtocol
from rolltree.agents.protocols.player import ExternalToolHandler
from rolltree.agents.protocols.single import AgentSource, InteractionProtocol, SingleAgentProtocol

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
