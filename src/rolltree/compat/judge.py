"""`JudgeRubric` with the constructor of verifiers 0.1.8."""

from __future__ import annotations

from typing import Any

from rolltree.parsers import Parser
from rolltree.rubrics import JUDGE_PROMPT
from rolltree.rubrics import JudgeRubric as _JudgeRubric
from rolltree.types import SamplingArgs


class JudgeRubric(_JudgeRubric):
    """A judge to which functions are added with `add_reward_func`.

    `parallelize_scoring` is ignored: functions always run side by side.
    """

    def __init__(
        self,
        parser: Parser | None = None,
        parallelize_scoring: bool = False,
        judge_client: Any = None,
        judge_model: str | None = None,
        judge_sampling_args: SamplingArgs | None = None,
        judge_prompt: str = JUDGE_PROMPT,
    ) -> None:
        super().__init__(
            parser=parser,
            judge_client=judge_client,
            judge_model=judge_model or "gpt-4.1-nano",
            judge_prompt=judge_prompt,
            judge_sampling_args=judge_sampling_args,
        )
