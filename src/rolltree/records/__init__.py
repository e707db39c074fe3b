"""Working with stored runs: read them as tables, audit, rescore, replay and compare them.

Everything here reads through the store. What needs an environment, a model or torch says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolltree._helpers.lazy import loader
from rolltree.wings import exports

if TYPE_CHECKING:
    from rolltree.insight.auditing.report import CHECKS as CHECKS
    from rolltree.insight.auditing.report import AuditReport as AuditReport
    from rolltree.insight.auditing.report import CheckResult as CheckResult
    from rolltree.insight.auditing.report import Finding as Finding
    from rolltree.insight.auditing.run import audit as audit
    from rolltree.insight.comparison import ComparedPair as ComparedPair
    from rolltree.insight.comparison import RunComparison as RunComparison
    from rolltree.insight.comparison import compare as compare
    from rolltree.insight.export import export_run as export_run
    from rolltree.insight.recorded import Difference as Difference
    from rolltree.insight.replaying import ReplayReport as ReplayReport
    from rolltree.insight.replaying import replay as replay
    from rolltree.insight.replaying import replay_async as replay_async
    from rolltree.insight.replaying import replay_many as replay_many
    from rolltree.insight.replaying import replay_many_async as replay_many_async
    from rolltree.insight.rescored import CreditChange as CreditChange
    from rolltree.insight.rescored import RescoreReport as RescoreReport
    from rolltree.insight.rescoring import rescore as rescore
    from rolltree.insight.rescoring import rescore_async as rescore_async
    from rolltree.records.chosen import shown_requests as shown_requests
    from rolltree.records.read import RunData as RunData
    from rolltree.records.read import read_run as read_run
    from rolltree.records.rewards import reward_parts as reward_parts
    from rolltree.records.table import Column as Column
    from rolltree.records.table import Table as Table

_MODULES = {
    **exports(__name__),
    "chosen": "shown_requests",
    "read": "RunData read_run",
    "rewards": "reward_parts",
    "table": "Column Table",
}
__all__ = sorted(" ".join(_MODULES.values()).split())
__getattr__ = loader(__name__, _MODULES)
