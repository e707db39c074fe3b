"""Protocols: the loops between agents and worlds.

A protocol plays one episode and returns its rollouts.
"""

from rolltree.protocols.budget import Budget as Budget
from rolltree.protocols.budget import BudgetedClient as BudgetedClient
from rolltree.protocols.delegation import DelegatingProtocol as DelegatingProtocol
from rolltree.protocols.delegation import SubAgent as SubAgent
from rolltree.protocols.delegation import delegate_tool as delegate_tool
from rolltree.protocols.episode import EpisodeContext as EpisodeContext
from rolltree.protocols.episode import Recording as Recording
from rolltree.protocols.episode import RolloutBuilder as RolloutBuilder
from rolltree.protocols.episode import open_world as open_world
from rolltree.protocols.multi_agent import MultiAgentSyncProtocol as MultiAgentSyncProtocol
from rolltree.protocols.multi_agent import Opponent as Opponent
from rolltree.protocols.multi_agent import TurnProtocol as TurnProtocol
from rolltree.protocols.player import ExternalToolHandler as ExternalToolHandler
from rolltree.protocols.single import AgentSource as AgentSource
from rolltree.protocols.single import InteractionProtocol as InteractionProtocol
from rolltree.protocols.single import SingleAgentProtocol as SingleAgentProtocol

SingleAgentSyncProtocol = SingleAgentProtocol
"""Another name for `SingleAgentProtocol`."""
MultiAgentProtocol = MultiAgentSyncProtocol
"""Another name for `MultiAgentSyncProtocol`."""
