"""`TextArenaEnv` of verifiers 0.1.8."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from rolltree.agents.worlds.textarena_game import game_maker
from rolltree.values.types import Messages, State
from rolltree.verifiers.environments import MultiTurnEnv, cleanup, stop
from rolltree.verifiers.parsers import Parser, XMLParser
from rolltree.verifiers.rubrics import Rubric


class TextArenaEnv(MultiTurnEnv):
    """A word game of the `textarena` package for one player, whose secret word is the answer.

    Raises:
        ConfigError: the package is missing, or has no such game.
    """

    def __init__(
        self,
        game: str = "Wordle-v0",
        num_train_examples: int = 1000,
        num_eval_examples: int = 0,
        system_prompt: str | None = None,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
        feedback_fn: Callable[[str], str] = lambda text: text,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        self.game = game
        self.num_train_examples = num_train_examples
        self.num_eval_examples = num_eval_examples
        self.seed = seed
        self.feedback_fn = feedback_fn
        self.ta_env = game_maker(game, {})()
        dataset, eval_dataset = self.ta_to_hf()
        MultiTurnEnv.__init__(
            self,
            dataset=dataset,
            eval_dataset=eval_dataset,
            system_prompt=system_prompt,
            parser=parser or XMLParser(fields=["think", "guess"], answer_field="guess"),
            rubric=rubric,
            message_type="chat",
            **kwargs,
        )

    @cleanup
    async def cleanup_ta_env(self, state: State) -> None:
        """Forget the rollout's game."""
        state.pop("ta_env", None)

    @stop
    async def game_completed(self, state: State) -> bool:
        """The game is over."""
        return bool(state.get("game_completed", False))

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Messages:
        """Play the model's guess and return the game's observation."""
        game = state.get("ta_env")
        if game is None:
            # In the first turn, as in verifiers.
            game = state["ta_env"] = deepcopy(self.ta_env)
            game.reset(num_players=1)
            # The row's word replaces the one that the game has drawn.
            game.state.game_state["secret_word"] = state["answer"]
        state["game_completed"], _ = game.step(str(self.parser.parse_answer(messages)))
        _, observation = game.get_observation()
        return [{"role": "user", "content": str(self.feedback_fn(observation))}]

    def ta_to_hf(self) -> tuple[Any, Any]:
        """Return training and evaluation rows: the game's first observation, and a secret word."""
        from datasets import Dataset

        game = game_maker(self.game, {})()
        game.reset(num_players=1)
        _, question = game.get_observation()
        # The global generator, as in verifiers: the same seed gives the same words.
        random.seed(self.seed)
        num = self.num_train_examples + self.num_eval_examples
        rows = [{"question": question, "answer": random.choice(game.word_list)} for _ in range(num)]
        held_out = rows[self.num_train_examples :]
        train = Dataset.from_list(rows[: self.num_train_examples])
        return train, Dataset.from_list(held_out) if self.num_eval_examples > 0 else None
