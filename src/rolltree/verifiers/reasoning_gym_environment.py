"""`ReasoningGymEnv` of verifiers 0.1.8. Importing it imports `reasoning_gym`, for its prompt."""

from __future__ import annotations

from typing import Any

from rolltree.values.errors import ConfigError
from rolltree.values.types import Messages
from rolltree.verifiers.environments import SingleTurnEnv
from rolltree.verifiers.parsers import Parser, XMLParser
from rolltree.verifiers.rubrics import Rubric

try:
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.utils import SYSTEM_PROMPTS
except ImportError as error:
    raise ConfigError(
        "ReasoningGymEnv needs the `reasoning-gym` package. Install it with "
        "`pip install rolltree[worlds]`."
    ) from error

# A default in the constructor's signature, so the package is needed at import, as in verifiers.
DEFAULT_SYSTEM_PROMPT = str(SYSTEM_PROMPTS["default"])


class ReasoningGymEnv(SingleTurnEnv):
    """Questions of the `reasoning_gym` package; a row's answer is its index in the data set."""

    def __init__(
        self,
        gym: str | list[str | dict[str, Any]],
        num_train_examples: int = 1000,
        num_eval_examples: int = 100,
        system_prompt: str = DEFAULT_SYSTEM_PROMPT,
        parser: Parser | None = None,
        seed: int = 0,
    ) -> None:
        self.gym = gym
        self.num_train_examples = num_train_examples
        self.num_eval_examples = num_eval_examples
        self.seed = seed
        total = num_train_examples + num_eval_examples
        self.rg_dataset = self.build_rg_dataset(gym, total, seed=seed)
        dataset, eval_dataset = self.rg_to_hf(self.rg_dataset)
        parser = parser or XMLParser(fields=["answer"])
        rubric = Rubric(parser=parser)

        async def check_answer_reward_func(
            completion: Messages, answer: str, **kwargs: Any
        ) -> float:
            """Return the task's own score of the answer."""
            # Tasks need more than the answer to score, so the row holds the entry's index.
            entry = self.rg_dataset[int(answer)]
            text = str(parser.parse_answer(completion)).strip()
            return float(self.rg_dataset.score_answer(answer=text, entry=entry))

        rubric.add_reward_func(check_answer_reward_func)
        rubric.add_reward_func(parser.get_format_reward_func(), weight=0.0)
        SingleTurnEnv.__init__(
            self,
            dataset=dataset,
            eval_dataset=eval_dataset,
            system_prompt=system_prompt,
            parser=parser,
            rubric=rubric,
            message_type="chat",
        )

    def build_rg_dataset(
        self, gym: str | list[str | dict[str, Any]], total_examples: int = 1000, seed: int = 0
    ) -> Any:
        """Return the data set of one task, or of several in a mixture.

        Raises:
            ConfigError: an item is neither a task's name nor a dict of name, weight and config.
        """
        if isinstance(gym, str):
            return reasoning_gym.create_dataset(gym, size=total_examples, seed=seed)
        specs = []
        for item in gym:
            if not isinstance(item, str | dict):
                raise ConfigError(f"Invalid dataset config: {item}")
            named = {"name": item, "weight": 1.0, "config": {}} if isinstance(item, str) else item
            specs.append(DatasetSpec(**named))
        return reasoning_gym.create_dataset(
            "composite", datasets=specs, size=total_examples, seed=seed
        )

    def rg_to_hf(self, rg_dataset: Any) -> tuple[Any, Any]:
        """Return training and evaluation rows."""
        from datasets import Dataset

        rows = [
            {
                "question": entry["question"],
                "answer": str(index),
                "task": entry["metadata"]["source_dataset"],
            }
            for index, entry in enumerate(rg_dataset)
        ]
        num = self.num_train_examples
        return Dataset.from_list(rows[:num]), Dataset.from_list(rows[num:])
