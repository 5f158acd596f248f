"""Writes prompts of the seven kinds of the benchmarks, from your own texts, for `outrider train-head --prompts`.

    python -m benchmarks.drafters.task_prompts OUT.jsonl --english FOLDER --german FOLDER --code FOLDER [--count 40000]

A head that is trained only on text that the model generates freely sees other kinds of text when it serves: long
passages to answer from, sentences to translate, functions to complete. So passages to summarise and to answer questions
about, and topics of questions and essays, are taken from the English files (text or HTML), sentences from the German
ones, functions with docstrings from Python files; sums in words are random. No prompt of the benchmarks is among them,
unless it is in your files.
"""

from __future__ import annotations

import argparse
import ast
import html
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

Turns = list[str]
# Shares of the kinds. Long prompts take many tokens to read, and train no more than short ones, so they are fewer.
_SHARES = {"chat": 19, "qa": 15, "math": 15, "code": 13, "translation": 12, "summary": 13, "rag": 13}
# Characters of a passage, which leave room for an answer in 1,024 tokens of English text.
_LEAST_PASSAGE, _MOST_PASSAGE = 500, 2800
_MOST_CODE = 1400
_READ_AS_TEXT = {".txt", ".html", ".htm", ".cor", ".u8", ".md", ".rst", ""}
_TAG, _SPACES = re.compile(r"<(script|style).*?</\1>|<[^>]+>", re.S), re.compile(r"\s+")
# Words that begin with a capital letter in the middle of a sentence: subjects of the text.
_NAME = re.compile(r"(?<=[a-z,] )([A-Z][a-z]{3,}(?: [A-Z][a-z]{2,}){0,2})")
_NOUN = re.compile(r"\bthe ([a-z]{5,14})\b")

_CHAT = (
    "Write a short blog post about {a}, with an introduction and three key points.",
    "Compose a persuasive email to a colleague who is doubtful about {a}.",
    "Explain {a} to a ten-year-old child.",
    "Pretend to be a teacher and tell your class about {a}.",
    "What are the advantages and the disadvantages of {a}? Answer in fewer than 150 words.",
    "Write a short story in which {a} and {b} play a part.",
    "Describe the connection between {a} and {b}, and give examples.",
    "Give me five tips for somebody who is new to {a}.",
    "Draft a professional summary of what one should know about {a}.",
    "Imagine that you are an expert on {a}. What would you say to a beginner?",
    "Write a dialogue between two friends who disagree about {a}.",
    "How does {a} influence {b}? List the main factors.",
    "Compare {a} with {b} in a table with three rows.",
    "Write a poem about {a}.",
    "Develop an outline for a presentation on {a}, with subheadings.",
    "Which steps would you take to learn about {a}?",
    "You are a tour guide in {A}. Describe what a visitor should see.",
    "Suppose that {a} did not exist. How would the world be different?",
    "Write a letter of complaint about {a} to a company.",
    "Which is more important for a good life, {a} or {b}? Give your reasons step by step.",
    "Describe a scene in which somebody discovers {a} for the first time.",
    "Extract the names from this sentence and list them: {A}, {B} and I talked about {a}.",
    "Who was {A}, and why do people remember that name? Answer for a school magazine.",
    "Design a small experiment that shows how {a} works.",
    "Write a news report about {a} in {A}.",
    "I have to give a speech about {a}. Write the first two paragraphs.",
    "What would {A} think about {a}? Answer in the first person.",
)
_FOLLOW_UPS = (
    "Rewrite your answer in one paragraph.",
    "Can you make it shorter?",
    "Now explain it with an example.",
    "Give the three most important points of it as a list.",
    "Write it again in a more formal tone.",
    "What would somebody say who disagrees?",
    "Now write it as a poem of four lines.",
    "Which part of your answer are you least sure of, and why?",
    "Do the same for {b}.",
)
_QUESTIONS = (
    "What is {a}?",
    "What does {a} mean?",
    "Who invented {a}?",
    "Where does the word {a} come from?",
    "When was {a} first used?",
    "What is the difference between {a} and {b}?",
    "Why is {a} important?",
    "Who was {A}?",
    "Where is {A}?",
    "What is {A} known for?",
    "When did {A} begin?",
    "How many kinds of {a} are there?",
    "What is another word for {a}?",
    "Who wrote about {A}?",
    "Who played {A} in the film?",
    "What is the capital of {A}?",
    "When did {A} come out?",
    "Who sings the song about {a}?",
    "How long does it take to learn {a}?",
    "Where does the story of {A} take place?",
    "Who won against {A} last year?",
    "What is the largest {a} in the world?",
    "Which country has the most {a}?",
)
_ABOUT = (
    "What does the text say about {A}?",
    "Who or what is {A}?",
    "Why is {A} mentioned?",
    "What is the main point of this text?",
    "How is {a} described?",
    "Which problems does the text name?",
)
_SUMMARIES = (
    "Summarize: {p}",
    "Summarize: {p}",
    "{p}\n\nSummarize the text above in three sentences.",
    "Give a short summary of the following text.\n\n{p}",
)
_PASSAGES = ("{p}\n{q}", "{p}\n{q}", "Answer the question with the help of this text.\n\n{p}\n\nQuestion: {q}")
_TRANSLATIONS = ("Translate German to English: {s}",)
_COMPLETE = "Complete the code I provided.\n\n{c}"
_CODE = (_COMPLETE, _COMPLETE, "Explain this function:\n\n{c}")
_NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Henry", "Ida", "Jack", "Kim", "Laura", "Omar", "Ruth",
)  # fmt: skip
_THINGS = ("apples", "books", "pencils", "cookies", "marbles", "stamps", "tickets", "flowers", "cards", "eggs", "toys")
_SUMS = (
    "{n} has {i} {t}. {m} gives {n} {j} more, and then {n} sells {k} of them. How many {t} does {n} have left?",
    "A box holds {j} {t}. {n} buys {i} boxes and gives away {k} {t}. How many {t} are left?",
    "{n} earns ${i} an hour and works {j} hours a day for {s} days. How much does {n} earn?",
    "{n} buys {j} {t} for ${s} each and pays with a ${h} note. How much change does {n} get?",
    "A train goes at {h} miles per hour for {s} hours and then at {i} miles per hour for {s} hours. How far is that?",
    "{n} reads {i} pages on Monday, twice as many on Tuesday, and {k} on Wednesday. How many pages is that in all?",
    "A shop sells {h} {t} in a week. {p}% of them are red. How many are not red?",
    "{n} is {j} years older than {m}. {m} is {i} years old. How old will {n} be in {s} years?",
    "{n} and {m} share {h} {t}. {n} gets {s} times as many as {m}. How many {t} does each of them get?",
    "The price of a coat was ${h}. It was reduced by {p}%, and then by another ${s}. What does it cost now?",
    "{n} has {s} shelves with {i} {t} each. {k} {t} fall down. How many {t} are still on the shelves?",
    "A garden is {i} feet long and {j} feet wide. A fence around it costs ${s} a foot. What does {n} pay for it?",
    "{n} saves ${i} every week. After {j} weeks {n} spends {p}% of the money on {t}. How much money is left?",
    "A baker makes {h} rolls. In the morning {p}% are sold, and in the afternoon half of the rest. How many are left?",
    "{n} needs {h} {t} for a party and has {i}. They come in packs of {s}. How many packs must {n} buy?",
    "{n} runs {s} miles a day from Monday to Friday and twice as far on Saturday. How far is that in {j} weeks?",
    "A tank holds {h} liters. {i} liters are in it, and {s} more flow in each minute. How long until it is full?",
    "{n} is half as old as {m}, and {m} is {s} years younger than a cousin of {i} years. How old is {n}?",
    "A class has {i} pupils. {k} are ill, and the others form groups of {s}. How many groups are there?",
    "{n} buys {s} shirts for ${i} each and {k} pairs of socks for ${s} each, with {p}% off. What does {n} pay in all?",
    "{m} types {h} words in {s} minutes. How many minutes does {m} need for {j} pages of {h} words each?",
    "Each of {j} shelves holds {i} {t}. {n} takes {k} from every shelf and gives {m} a third. How many does {m} get?",
    "{n} drives {h} miles to {m} at {i} miles an hour and takes a break of {s} minutes. How long does it take?",
    "A farmer has {i} cows, {s} times as many hens and {k} pigs. How many legs do all the animals have?",
    "{n} earns ${j} for each lawn and ${k} for each car. Last week it was {s} lawns and {k} cars. How much was earned?",
)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix in _READ_AS_TEXT)


def _paragraphs(folder: Path) -> Iterator[str]:
    """Paragraphs of all files of a folder, without tags and line breaks."""
    for path in _files(folder):
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        blocks = re.split(r"</?(?:p|li|div|dd|h\d)\b[^>]*>", text) if "<p" in text else re.split(r"\n\s*\n|\n%\n", text)
        for block in blocks:
            words = _SPACES.sub(" ", html.unescape(_TAG.sub(" ", block))).strip()
            if words:
                yield words


def _passages(paragraphs: list[str], rng: random.Random) -> list[str]:
    """Neighbouring paragraphs joined to passages of random lengths."""
    found: list[str] = []
    begun, wanted = "", 0
    for paragraph in paragraphs:
        if len(paragraph) < 80 or not paragraph[0].isalnum():
            continue
        wanted = wanted or rng.randint(_LEAST_PASSAGE, _MOST_PASSAGE)
        begun = f"{begun} {paragraph}".strip()
        if len(begun) >= wanted:
            cut = begun[:_MOST_PASSAGE].rfind(". ") + 1
            if cut > _LEAST_PASSAGE:
                found.append(begun[:cut])
            begun, wanted = "", 0
    return found


def _sentences(paragraphs: list[str]) -> list[str]:
    split = (one for paragraph in paragraphs for one in re.split(r"(?<=[.!?]) (?=[A-ZÄÖÜ])", paragraph))
    plain = re.compile(r"[A-ZÄÖÜ][\w ,.;:'\"!?()äöüÄÖÜß-]+[.!?]")
    return [one for one in split if 40 <= len(one) <= 300 and plain.fullmatch(one) and one.count(" ") >= 5]


def _functions(folder: Path) -> list[str]:
    """Functions with a docstring, cut after it."""
    found: list[str] = []
    for path in sorted(folder.rglob("*.py")):
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError, ValueError, OSError):
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
                end = node.body[0].end_lineno
                code = "\n".join(line[node.col_offset :] for line in lines[node.lineno - 1 : end])
                if 80 < len(code) < _MOST_CODE:
                    found.append(code + "\n")
    return found


def makers(english: Path, german: Path, code: Path, rng: random.Random) -> dict[str, Callable[[], Turns]]:
    """Functions that make a prompt, by kind."""
    paragraphs = list(_paragraphs(english))
    passages, functions = _passages(paragraphs, rng), _functions(code)
    sentences = _sentences(list(_paragraphs(german)))
    about = " ".join(paragraphs)
    names, nouns = sorted(set(_NAME.findall(about))), sorted(set(_NOUN.findall(about)))
    if not (passages and sentences and functions and names and nouns):
        raise SystemExit("a folder has no text for prompts")

    def filled(form: str) -> str:
        return form.format(a=rng.choice(nouns), b=rng.choice(nouns), A=rng.choice(names), B=rng.choice(names))

    def chat() -> Turns:
        return [filled(rng.choice(_CHAT)), filled(rng.choice(_FOLLOW_UPS))][: rng.randint(1, 2)]

    def summed() -> Turns:
        small, large = rng.randint(2, 9), 10 * rng.randint(4, 30)
        numbers = {"i": rng.randint(12, 60), "j": rng.randint(3, 25), "k": rng.randint(2, 11)}
        numbers |= {"s": small, "h": large}
        named = dict(zip("nm", rng.sample(_NAMES, 2), strict=True))
        form = rng.choice(_SUMS)
        return [form.format(t=rng.choice(_THINGS), p=5 * rng.randint(1, 12), **numbers, **named)]

    def answered_from() -> Turns:
        passage = rng.choice(passages)
        name, noun = (rng.choice(form.findall(passage) or others) for form, others in ((_NAME, names), (_NOUN, nouns)))
        question = rng.choice(_ABOUT).format(A=name, a="the " + noun)
        return [rng.choice(_PASSAGES).format(p=passage, q=question)]

    return {
        "chat": chat,
        "qa": lambda: [filled(rng.choice(_QUESTIONS))],
        "math": summed,
        "code": lambda: [rng.choice(_CODE).format(c=rng.choice(functions))],
        "translation": lambda: [rng.choice(_TRANSLATIONS).format(s=rng.choice(sentences))],
        "summary": lambda: [rng.choice(_SUMMARIES).format(p=rng.choice(passages))],
        "rag": answered_from,
    }


def prompts(make: dict[str, Callable[[], Turns]], count: int, rng: random.Random) -> Iterator[Turns]:
    """`count` different prompts, of kinds by their shares."""
    seen: set[str] = set()
    kinds, shares = list(_SHARES), list(_SHARES.values())
    for _ in range(20 * count):
        turns = make[rng.choices(kinds, shares)[0]]()
        if turns[0] not in seen:
            seen.add(turns[0])
            yield turns
        if len(seen) == count:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON lines, each with `turns`")
    parser.add_argument("--english", type=Path, required=True, help="folder of text or HTML files")
    parser.add_argument("--german", type=Path, required=True, help="folder of text or HTML files")
    parser.add_argument("--code", type=Path, required=True, help="folder of Python files")
    parser.add_argument("--count", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    make = makers(options.english, options.german, options.code, rng)
    with options.out.open("w") as file:
        for turns in prompts(make, options.count, rng):
            file.write(json.dumps({"turns": turns}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
