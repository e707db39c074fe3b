"""Small data in the format of the data sets that the published environments download."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]

WORDS = ["apple", "bread", "chair", "dance", "eagle", "flame", "grape", "house", "light", "money"]
"""The words of the game of Wordle, all nouns of five letters."""

SENTENCES = (
    "The river {} rises in the hills of the north",
    "Its water is clear and cold in every season of the year",
    "People have lived on its banks for {} hundred years and more",
    "They built a mill of grey stone where it meets the old road",
    "Today the mill is a museum that many people visit in summer",
    "The last miller gave it to the town after a long and quiet life",
    "A path leads from there along the water through meadows and small woods to the lake",
    "In spring the meadows are full of flowers and the whole valley smells of wet grass",
    "The lake at its end is deep and nobody has ever found the bottom of it",
)


def gsm8k(split: str) -> list[Row]:
    """Return sums in words, with worked answers."""
    start = 0 if split == "train" else 5_000
    return [
        {"question": f"What is {n} plus {n + 3}?", "answer": f"Add them.\n#### {2 * n + 3}"}
        for n in range(start, start + (1_000 if split == "train" else 40))
    ]


def competition_math(split: str) -> list[Row]:
    """Return problems with boxed answers, some of them fractions."""
    return [
        {
            "problem": f"Compute ${n} \\times 3$ for case {n}.",
            "level": "Level 1",
            "type": "Algebra",
            "solution": f"It is $\\boxed{{{3 * n}}}$."
            if n % 3
            else f"It is $\\boxed{{\\frac{{{n}}}{{7}}}}$.",
        }
        for n in range(1_000)
    ]


def gpqa(split: str) -> list[Row]:
    """Return questions with one right and three wrong answers."""
    return [
        {
            "Question": f"Which number follows {n}?",
            "Correct Answer": str(n + 1),
            **{f"Incorrect Answer {k}": str(n + 1 + k) for k in (1, 2, 3)},
        }
        for n in range(12)
    ]


def paragraphs(split: str) -> list[Row]:
    """Return paragraphs; every fourth is too short for either environment that reads them."""
    rows = []
    for n in range(24):
        sentences = [s.format(WORDS[n % 10].title()) for s in SENTENCES[: 9 if n % 4 else 2]]
        rows.append({"text": ". ".join(sentences * (2 if n % 4 else 1)) + "."})
    return rows


def simpleqa(split: str) -> list[Row]:
    """Return short questions about facts."""
    return [
        {
            "problem": f"Who wrote book number {n}?",
            "answer": WORDS[n % 10].title(),
            "metadata": "{}",
        }
        for n in range(12)
    ]


def comments(split: str) -> list[Row]:
    """Return comments with ratings."""
    names = ("severe_toxicity", "obscene", "threat", "insult", "identity_attack")
    return [
        {
            "text": f"This is comment {n}, {'and it is rude' if n % 2 else 'and it is kind'}.",
            "toxicity": 0.9 if n % 2 else 0.1,
            **{name: 0.8 if n % (k + 2) == 1 else 0.0 for k, name in enumerate(names)},
        }
        for n in range(12)
    ]


def reverse_text(split: str) -> list[Row]:
    """Return texts to reverse."""
    return [{"prompt": f"{WORDS[n % 10]} number {n}"} for n in range(12)]


def wiki_pages(split: str) -> list[Row]:
    """Return pages, with and without sections."""
    head = "# {}\nIntro\n## History\nOld.\n## Today\nNew."
    return [
        {
            "id": f"page_{n}",
            "title": f"{WORDS[n % 10].title()} {n}",
            "content": head.format(n) if n % 2 == 0 else f"Plain text about {n}.",
        }
        for n in range(15)
    ]


def wiki_questions(split: str) -> list[Row]:
    """Return questions about the pages."""
    return [
        {"question": f"What is said of {WORDS[n % 10]} {n}?", "answer": "Old.", "filename": "x"}
        for n in range(12)
    ]


def questions(split: str) -> list[Row]:
    """Return plain questions and answers."""
    return [{"question": f"Say {word}.", "answer": word} for word in WORDS]


def mmmu(split: str) -> list[Row]:
    """Return questions with a picture and four options."""
    from PIL import Image

    rows = []
    for n in range(6):
        picture = io.BytesIO()
        Image.new("RGB", (2, 2), (n * 40, 0, 0)).save(picture, format="PNG")
        rows.append(
            {
                "question": f"What is shown in <image 1> number {n}?",
                "options": "['red', 'green', 'blue', 'none']",
                "answer": "ABCD"[n % 4],
                "image_1": {"bytes": picture.getvalue(), "path": None},
                "id": f"dev_{n}",
            }
        )
    return rows


def problems(split: str) -> list[Row]:
    """Return problems with short answers, at two levels."""
    return [
        {"problem": f"Solve task {n}.", "answer": str(n), "level": "Hard" if n % 2 else "Easy"}
        for n in range(12)
    ]


def aime2025(split: str) -> list[Row]:
    """Return questions whose answers have a unit."""
    return [{"question": f"Find number {n}.", "answer": f"${n}^\\circ$"} for n in range(12)]


def mmlu(split: str) -> list[Row]:
    """Return questions with four choices and the index of the right one."""
    return [
        {"question": f"Pick {n}.", "subject": "x", "choices": ["a", "b", "c", "d"], "answer": n % 4}
        for n in range(12)
    ]


def mmlu_pro(split: str) -> list[Row]:
    """Return questions with ten options and the letter of the right one."""
    return [
        {"question": f"Pick {n}.", "options": list("abcdefghij"), "answer": "ABCDEFGHIJ"[n % 10]}
        for n in range(12)
    ]


def openbookqa(split: str) -> list[Row]:
    """Return questions with labelled choices."""
    return [
        {
            "id": str(n),
            "question_stem": f"Which is {n}?",
            "choices": {"text": ["a", "b", "c", "d"], "label": ["A", "B", "C", "D"]},
            "answerKey": "ABCD"[n % 4],
        }
        for n in range(12)
    ]


def prime_code(split: str) -> list[Row]:
    """Return programming tasks, some of another kind."""
    head = "Solve the following coding problem using the programming language python:"
    return [
        {"prompt": f"{head if n % 2 else 'Write C:'} print {n}", "verification_info": f"{n}"}
        for n in range(12)
    ]


TABLES: dict[tuple[str, str | None], tuple[tuple[str, ...], Callable[[str], list[Row]]]] = {
    ("openai/gsm8k", "main"): (("train", "test"), gsm8k),
    ("chiayewken/competition_math", None): (("train", "test"), competition_math),
    ("Idavidrein/gpqa", "gpqa_diamond"): (("train",), gpqa),
    ("Idavidrein/gpqa", "gpqa_main"): (("train",), gpqa),
    ("agentlans/wikipedia-paragraphs", None): (("train",), paragraphs),
    ("basicv8vc/SimpleQA", None): (("test",), simpleqa),
    ("google/civil_comments", None): (("train",), comments),
    ("PrimeIntellect/Reverse-Text-RL", None): (("train",), reverse_text),
    ("willcb/rare-wiki-pages", None): (("train",), wiki_pages),
    ("willcb/wiki-trivia-questions-v4", None): (("train",), wiki_questions),
    ("MMMU/MMMU", "Art"): (("dev", "validation", "test"), mmmu),
    ("MMMU/MMMU", "Music"): (("dev", "validation", "test"), mmmu),
    ("someone/questions", None): (("train",), questions),
    ("HuggingFaceH4/aime_2024", None): (("train",), problems),
    ("opencompass/AIME2025", "AIME2025-I"): (("test",), aime2025),
    ("opencompass/AIME2025", "AIME2025-II"): (("test",), aime2025),
    ("knoveleng/AMC-23", None): (("train",), problems),
    ("HuggingFaceH4/MATH-500", None): (("test",), problems),
    ("cais/mmlu", "all"): (("dev", "test"), mmlu),
    ("TIGER-Lab/MMLU-Pro", None): (("validation", "test"), mmlu_pro),
    ("allenai/openbookqa", "main"): (("train", "test"), openbookqa),
    ("knoveleng/open-rs", None): (("train",), problems),
    ("PrimeIntellect/verifiable-coding-problems", None): (("train",), prime_code),
}
"""By data set and configuration: the splits there are, and the rows of one."""


def truths() -> dict[str, str]:
    """Return the right answers by question, for the scripted model. The longest come first."""
    found = {row["question"]: row["answer"].split("#### ")[1] for row in gsm8k("train")[:60]}
    found |= {row["question"]: row["answer"].split("#### ")[1] for row in gsm8k("test")}
    for n, row in enumerate(competition_math("train")[:60]):
        found[row["problem"]] = str(3 * n) if n % 3 else f"\\frac{{{n}}}{{7}}"
    found |= {row["Question"]: "ABCD"[n % 4] for n, row in enumerate(gpqa("train"))}
    found |= {row["problem"]: row["answer"] for row in simpleqa("test")}
    found |= {row["text"]: "toxic" if n % 2 else "fine" for n, row in enumerate(comments("train"))}
    found |= {row["prompt"]: row["prompt"][::-1] for row in reverse_text("train")}
    found |= {row["question"]: row["answer"] for row in questions("train")}
    found |= {row["question"]: row["answer"] for row in mmmu("dev")}
    found |= {f"number {n}": "0 1" for n in range(3)}
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


TRUTH = truths()


def shuffled(seed: int, items: list[Any]) -> list[Any]:
    """Return the items in an order of that seed."""
    return random.Random(seed).sample(items, len(items))
