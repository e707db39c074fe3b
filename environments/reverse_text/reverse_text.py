"""Write a text backwards: one question, one answer, rows generated from a seed.

The rows are made here and are not a benchmark.
"""

from __future__ import annotations

import random
from difflib import SequenceMatcher

import rolltree as rt

VOCABULARY = (
    "amber anchor apple autumn basket bridge candle canyon castle cherry circle cloud copper "
    "cotton desert dragon engine feather forest garden ginger harbor island jacket kettle ladder "
    "lantern lemon marble meadow mirror morning needle ocean orange paper pebble pencil planet "
    "pocket rabbit ribbon river rocket saddle shadow silver spider spring stone sunset table "
    "thunder ticket tiger timber tunnel valley velvet village violin walnut window winter yellow"
)
SYSTEM = (
    "Write the text backwards, character by character, spaces included. "
    "Answer in this form:\n<reversed_text>\n...\n</reversed_text>"
)


def make_texts(num: int, min_words: int, max_words: int, seed: int) -> list[str]:
    """Return `num` different texts."""
    rng, words = random.Random(seed), VOCABULARY.split()
    texts: dict[str, None] = {}
    for _ in range(100 * num):
        if len(texts) == num:
            break
        texts[" ".join(rng.choices(words, k=rng.randint(min_words, max_words)))] = None
    if len(texts) < num:
        raise rt.ConfigError(
            f"only {len(texts)} of {num} different texts could be made of {min_words} to "
            f"{max_words} words; the splits would overlap. Ask for fewer rows or more words."
        )
    return list(texts)


def load_environment(
    num_train: int = 500, num_eval: int = 100, min_words: int = 2, max_words: int = 5, seed: int = 0
) -> rt.Environment:
    """Return the environment; training and evaluation texts do not overlap."""
    texts = make_texts(num_train + num_eval, min_words, max_words, seed)
    rows = [{"question": text, "answer": text[::-1]} for text in texts]
    parser = rt.XMLParser(["reversed_text"], answer_field="reversed_text")

    @rt.run_inline
    def similarity(parser: rt.XMLParser, completion: rt.Messages, answer: str) -> float:
        given = (parser.parse_answer(completion) or "")[: 20 * len(answer)]
        return SequenceMatcher(None, given, answer, autojunk=False).ratio()

    @rt.run_inline
    def exact(parser: rt.XMLParser, completion: rt.Messages, answer: str) -> float:
        return float(parser.parse_answer(completion) == answer)

    rubric = rt.Rubric([similarity], parser=parser)
    rubric.add_metric(exact)
    rubric.add_metric(parser.get_format_reward_func(), run_inline=True)
    return rt.SingleTurnEnv(
        dataset=rows[:num_train] or None,
        eval_dataset=rows[num_train:] or None,
        system_prompt=SYSTEM,
        parser=parser,
        rubric=rubric,
    )
