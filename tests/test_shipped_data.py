"""The shipped data: reproducible, held out, well formed, and right by a second reading of the words."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).parents[1] / "data"
FILES = ("pretrain.jsonl", "train.jsonl", "heldout.jsonl", "heldout.txt")
TEENS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen"""
SMALL = {name: value for value, name in enumerate(re.findall(r"\w+", TEENS))}
SMALL |= {name: 10 * tens for tens, name in enumerate(["twenty", "thirty", "forty", "fifty"], start=2)}
SMALL |= {name: 10 * tens for tens, name in enumerate(["sixty", "seventy", "eighty", "ninety"], start=6)}
NTH = {"first": 1, "second": 2, "third": 3, "fifth": 5, "eighth": 8, "ninth": 9, "twelfth": 12}
NTH |= {name.removesuffix("y") + "ieth": value for name, value in SMALL.items() if value in (20, 30)}
NTH |= {name + "th": value for name, value in SMALL.items() if value < 20 and name + "th" not in NTH}
NUMBER = "(?:(?:" + "|".join(sorted([*SMALL, "hundred", "thousand", "and"], key=len, reverse=True)) + r")\b[ -]?)+"
EXACT = re.compile(
    r"\d{4}-\d\d-\d\d|\d\d:\d\d|"
    r"\d+ d \d+ h|\d+ h \d+ min|\d+ min \d+ s|(?:GBP|USD|EUR) \d+\.\d\d|\d+°\d\d'[NSEW]|\d{3,4}"
)
MONTH = "(january|february|march|april|may|june|july|august|september|october|november|december)"
DATE = re.compile(rf"the (\S+) (?:day )?of {MONTH} ({NUMBER})|{MONTH} the (\S+), ({NUMBER})")
UNITS = {"day": "d", "hour": "h", "minute": "min", "second": "s"}
CODES = {"pound": "GBP", "dollar": "USD", "euro": "EUR"}


def number(words: str) -> int:
    total = part = 0
    for word in re.split(r"[ -]+", words.strip()):
        if word == "thousand":
            total, part = total + 1000 * part, 0
        elif word == "hundred":
            part *= 100
        elif word != "and":
            part += SMALL[word]
    return total + part


def read_year(words: str) -> int:
    if "hundred" in words or "thousand" in words:
        return number(words)
    century, rest = words.split(maxsplit=1)
    return 100 * number(century) + number(rest)


def read_date(date: re.Match[str]) -> str:
    nth, month, year = (date[1], date[2], date[3]) if date[1] else (date[5], date[4], date[6])
    tens, _, ones = nth.rpartition("-")
    day = (SMALL[tens] if tens else 0) + NTH[ones]
    return datetime.datetime.strptime(f"{day} {month} {read_year(year)}", "%d %B %Y").date().isoformat()


def read_time(words: str) -> str:
    match = re.search(
        rf"(?:(a quarter|half|{NUMBER})(?: ?minutes?)? ?(past|after|to) )?"
        rf"(noon|midnight|(?:{NUMBER})(?:o'clock )?(in the morning|in the afternoon|in the evening|at night))",
        words,
    )
    assert match, words
    away, side, name, part = match.groups()
    if part:
        hour = number(re.match(NUMBER, name)[0])  # type: ignore[index]
        if part == "at night":
            hour += 12 if hour >= 10 and hour != 12 else 0
        elif part != "in the morning" and hour != 12:
            hour += 12
    else:
        hour = {"noon": 12, "midnight": 0}[name]
    minutes = {"a quarter": 15, "half": 30, None: 0}.get(away, -1)
    minutes = number(away) if minutes < 0 else minutes
    moment = datetime.datetime(2000, 1, 2, hour) + datetime.timedelta(minutes=-minutes if side == "to" else minutes)
    return moment.strftime("%H:%M")


def read(words: str) -> str:
    """The exact form of what a question or an answer says in words, read without the generator's code."""
    words = words.lower()
    if date := DATE.search(words):
        return read_date(date)
    if position := re.search(rf"({NUMBER})degrees? (?:and )?({NUMBER})minutes? (north|south|east|west)", words):
        return f"{number(position[1])}°{number(position[2]):02d}'{position[3][0].upper()}"
    if money := re.search(
        rf"({NUMBER})(pound|dollar|euro)s?\b(?: and ({NUMBER})(?:penny|pence|cents?)| ({NUMBER}))?", words
    ):
        return f"{CODES[money[2]]} {number(money[1])}.{number(money[3] or money[4] or 'zero'):02d}"
    if re.search(r"\b(morning|afternoon|evening|night|noon|midnight)\b", words):
        return read_time(words)
    if half := re.search(rf"({NUMBER})(?:(a half) hours|hours and (a quarter))", words.replace("and a half", "a half")):
        return f"{number(half[1])} h {30 if half[2] else 15} min"
    if span := re.search(rf"({NUMBER})(day|hour|minute)s? (?:and )?({NUMBER})(hour|minute|second)s?", words):
        return f"{number(span[1])} {UNITS[span[2]]} {number(span[3])} {UNITS[span[4]]}"
    return str(number(max(re.findall(NUMBER, words), key=len)))


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def exchanges(name: str) -> list[tuple[str, str]]:
    """(question, answer) of every exchange of a chat file."""
    pairs = []
    for row in rows(name):
        messages = [message for message in row["messages"] if message["role"] != "system"]
        pairs += [(q["content"], a["content"]) for q, a in zip(messages[::2], messages[1::2], strict=True)]
    return pairs


def exact_and_words(question: str, answer: str) -> tuple[str, str]:
    if EXACT.fullmatch(answer):
        return answer, question
    found = EXACT.search(question)
    assert found, (question, answer)
    return found[0], answer


def test_the_script_writes_the_same_bytes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-B", str(DATA / "generate.py"), "--out", str(tmp_path)], check=True)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes(), name
    assert sum((DATA / name).stat().st_size for name in FILES) < 5_000_000


@pytest.mark.parametrize(("name", "at_least"), [("train.jsonl", 2000), ("heldout.jsonl", 200)])
def test_every_chat_alternates_and_its_answers_are_right(name: str, at_least: int) -> None:
    assert len(rows(name)) >= at_least
    for row in rows(name):
        assert list(row) == ["messages"]
        roles = [message["role"] for message in row["messages"]]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)
        assert turns
        assert all(message["content"].strip() == message["content"] != "" for message in row["messages"])
    for question, answer in exchanges(name):
        exact, words = exact_and_words(question, answer)
        assert read(words) == exact, (question, answer)


def test_no_held_out_question_or_value_stands_in_the_training_files() -> None:
    heldout, train = exchanges("heldout.jsonl"), exchanges("train.jsonl")
    assert not {question for question, _ in heldout} & {question for question, _ in train}
    values = {exact_and_words(*pair)[0] for pair in heldout}
    assert not values & {exact_and_words(*pair)[0] for pair in train}
    written = {found for row in rows("pretrain.jsonl") for found in EXACT.findall(row["text"])}
    assert not values & written


def test_no_answer_is_common_enough_to_be_guessed() -> None:
    answers = [answer for _, answer in exchanges("heldout.jsonl")]
    assert max(answers.count(answer) for answer in answers) <= 3


def test_every_document_has_both_forms() -> None:
    documents = [row["text"] for row in rows("pretrain.jsonl")]
    assert len(set(documents)) == len(documents)
    with_both = [text for text in documents if EXACT.search(text) and re.search(NUMBER, text.lower())]
    assert len(with_both) > 0.95 * len(documents)
    assert 20_000 < (DATA / "heldout.txt").stat().st_size < 100_000
