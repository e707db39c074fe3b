"""Wordle: find a word of five letters in six guesses; the reply to each guess is its colours.

The secret words are a short list of common English words, written for this package: they are not
those of the newspaper's game. `words` takes a file with other words.
"""

from __future__ import annotations

import random
from pathlib import Path

import rolltree as rt

WORDS = (
    "about above actor adopt again agree alarm album alert alive anger apple arena arrow aside "
    "award bacon badge basic beach beard begin below bench berry birth black blade blame blank "
    "blaze blend block bloom board boost brain brave bread brick bring broad brown brush build "
    "cabin cable candy carry catch cause chain chair chalk charm chase cheap check chess chest "
    "child choir civic claim clean clear clerk climb clock cloud coach coast coral couch count "
    "cover crane cream cross crowd crown curve daily dance depth dough dozen draft dream dress "
    "drink drive eagle early earth elbow empty enjoy entry equal event exact extra faith field "
    "fight final flame flash fleet floor flour focus force frame fresh front fruit giant glass "
    "globe grace grain grape grass great green group guard guess guide happy heart heavy honey "
    "horse hotel house human ideal image juice kneel knife labor large laugh layer learn lemon"
)
SYSTEM = (
    "We play Wordle. Find the secret word of five letters in at most six guesses. I answer each "
    "guess letter by letter: G is right, Y is elsewhere in the word, X is not in the word. Think, "
    "then guess one word in this form:\n<guess>\n...\n</guess>"
)


def colours(guess: str, secret: str) -> str:
    """Return G, Y or X per letter; a letter gets Y as often as it is in the rest of the secret."""
    marks = ["G" if g == s else "X" for g, s in zip(guess, secret, strict=True)]
    rest = [s for g, s in zip(guess, secret, strict=True) if g != s]
    for index, letter in enumerate(guess):
        if marks[index] == "X" and letter in rest:
            marks[index] = "Y"
            rest.remove(letter)
    return "".join(marks)


def guesses(parser: rt.Parser, state: rt.State) -> list[str]:
    """Return the guess of each message so far, "" if there is none."""
    said = [parser.parse_answer(step["completion"]) or "" for step in state["trajectory"]]
    return [text.strip().lower() for text in said]


class WordleEnv(rt.MultiTurnEnv):
    async def env_response(self, messages: rt.Messages, state: rt.State) -> rt.Messages:
        guess = guesses(self.parser, state)[-1]
        if len(guess) != 5 or not guess.isalpha():
            said = "Guess one word of five letters between <guess> and </guess>."
        else:
            said = f"{' '.join(guess.upper())}\n{' '.join(colours(guess, state['answer']))}"
        left = self.max_turns - len(state["trajectory"])
        return [{"role": "user", "content": f"{said}\n{left} guesses are left."}]

    @rt.stop
    async def solved(self, state: rt.State) -> bool:
        return guesses(self.parser, state)[-1:] == [state["answer"]]


@rt.run_inline
def win(state: rt.State) -> float:
    return float(state["stop_condition"] == "solved")


@rt.run_inline
def best_colours(parser: rt.Parser, state: rt.State, answer: str) -> float:
    """Return the largest share of letters in the right place in one guess."""
    made = [guess for guess in guesses(parser, state) if len(guess) == 5]
    return max((colours(guess, answer).count("G") for guess in made), default=0) / 5


def load_environment(
    num_eval: int = 40, max_turns: int = 6, words: str | None = None, seed: int = 0
) -> rt.Environment:
    """Return the game; training and evaluation have different secret words."""
    text = WORDS if words is None else Path(words).read_text(encoding="utf-8")
    secrets = sorted({word.lower() for word in text.split() if len(word) == 5 and word.isalpha()})
    random.Random(seed).shuffle(secrets)
    asked = "Game {}. Make your first guess."
    rows = [{"question": asked.format(n), "answer": word} for n, word in enumerate(secrets)]
    parser = rt.XMLParser(["guess"], answer_field="guess")
    rubric = rt.Rubric([win, best_colours], weights=[0.8, 0.2], parser=parser)
    rubric.add_metric(parser.get_format_reward_func(), run_inline=True)
    return WordleEnv(
        dataset=rows[num_eval:] or None,
        eval_dataset=rows[:num_eval] or None,
        system_prompt=SYSTEM,
        parser=parser,
        rubric=rubric,
        max_turns=max_turns,
    )
