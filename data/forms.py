"""Plain words and exact forms of the same thing: dates, clock times, numbers, durations, money and positions.

Each kind draws a value and says it in both ways:

    date      the third of March twenty twenty-one         2021-03-03
    time      a quarter past four in the afternoon         16:15
    number    three hundred and forty-two                  342
    duration  three hours and twenty minutes               3 h 20 min
    money     four pounds and sixty pence                  GBP 4.60
    position  thirty-four degrees and five minutes south   34°05'S

One value in ten of every kind is reserved: it may be asked in the held-out chats, and is written nowhere else.
"""

from __future__ import annotations

import datetime
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


def listed(text: str, separator: str = " ") -> tuple[str, ...]:
    return tuple(text.split(separator))


ONES = listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
TENS = listed("twenty thirty forty fifty sixty seventy eighty ninety")
ORDINALS = listed(
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
    "fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"
)
MONTHS = listed("January February March April May June July August September October November December")
CURRENCIES = {"GBP": ("pound", "penny", "pence"), "USD": ("dollar", "cent", "cents"), "EUR": ("euro", "cent", "cents")}
NUM_SLICES = 10  # one slice of the values is reserved for the held-out chats


@dataclass(frozen=True)
class Form:
    """One value said in both ways."""

    kind: str
    words: str  # the one way in which we say it when asked for words
    said: str  # a way in which someone may say it; often the same as `words`
    exact: str

    @property
    def reserved(self) -> bool:
        """Whether the value belongs to the held-out chats; a property of the value, not of the draw."""
        return zlib.crc32(f"{self.kind} {self.exact}".encode()) % NUM_SLICES == 0


def below(rng: random.Random, stop: int) -> int:
    """A whole number in [0, stop), from `random()` alone: the one method whose sequence Python promises to keep."""
    return int(rng.random() * stop)


def pick(rng: random.Random, options: Sequence[Any]) -> Any:
    return options[below(rng, len(options))]


def cardinal(number: int) -> str:
    """0 to 9999 in British words: 1042 is "one thousand and forty-two"."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10 - 2] + (f"-{ONES[number % 10]}" if number % 10 else "")
    if number < 1000:
        head, rest = f"{ONES[number // 100]} hundred", number % 100
        return f"{head} and {cardinal(rest)}" if rest else head
    head, rest = f"{ONES[number // 1000]} thousand", number % 1000
    if not rest:
        return head
    return f"{head} and {cardinal(rest)}" if rest < 100 else f"{head} {cardinal(rest)}"


def ordinal(number: int) -> str:
    """1 to 31: 21 is "twenty-first"."""
    if number <= 20:
        return ORDINALS[number - 1]
    if number == 30:
        return "thirtieth"
    return f"{TENS[number // 10 - 2]}-{ORDINALS[number % 10 - 1]}"


def year_in_words(year: int) -> str:
    """1984 is "nineteen eighty-four", 1907 "nineteen hundred and seven", 2003 "two thousand and three"."""
    century, rest = divmod(year, 100)
    if rest >= 10:
        return f"{cardinal(century)} {cardinal(rest)}"
    return (
        cardinal(year) if century == 20 else f"{cardinal(century)} hundred" + (f" and {cardinal(rest)}" if rest else "")
    )


def counted(number: int, one: str, many: str | None = None) -> str:
    return f"{cardinal(number)} {one if number == 1 else many or one + 's'}"


def draw_date(rng: random.Random) -> Form:
    day = datetime.date(1900, 1, 1) + datetime.timedelta(days=below(rng, 47481))  # to 2029-12-30
    nth, month, year = ordinal(day.day), MONTHS[day.month - 1], year_in_words(day.year)
    words = f"the {nth} of {month} {year}"
    said = pick(rng, (words, words, f"{month} the {nth}, {year}"))
    return Form("date", words, said, day.isoformat())


def part_of_day(hour: int) -> str:
    if 4 <= hour < 12:
        return "in the morning"
    if 12 <= hour < 18:
        return "in the afternoon"
    return "in the evening" if 18 <= hour < 22 else "at night"


def draw_time(rng: random.Random) -> Form:
    hour = below(rng, 24)
    minute = 5 * below(rng, 12) if rng.random() < 0.4 else below(rng, 60)
    near = hour if minute <= 30 else (hour + 1) % 24
    away = minute if minute <= 30 else 60 - minute
    name = {0: "midnight", 12: "noon"}.get(near) or f"{ONES[near % 12]} {part_of_day(hour)}"
    if away == 0:
        words = name if near in (0, 12) else name.replace(" ", " o'clock ", 1)
        said = pick(rng, (words, name))
    else:
        side = "past" if minute <= 30 else "to"
        amount = {15: "a quarter", 30: "half"}.get(away) or (
            cardinal(away) if away % 5 == 0 else counted(away, "minute")
        )
        words = f"{amount} {side} {name}"
        said = words.replace(" past ", " after ") if side == "past" and away != 30 and rng.random() < 0.3 else words
    return Form("time", words, said, f"{hour:02d}:{minute:02d}")


def draw_number(rng: random.Random) -> Form:
    number = pick(rng, (100, 1000))
    number += below(rng, 9 * number)
    if rng.random() < 0.15:  # round numbers, which people like
        number -= number % pick(rng, (10, 100))
    return Form("number", cardinal(number), cardinal(number), str(number))


def draw_duration(rng: random.Random) -> Form:
    units = (("day", "d", 60), ("hour", "h", 24), ("minute", "min", 60), ("second", "s", 60))
    first = below(rng, 3)
    (large_name, large_sign, large_stop), (small_name, small_sign, small_stop) = units[first], units[first + 1]
    large, small = 1 + below(rng, large_stop - 1), 1 + below(rng, small_stop - 1)
    if first == 1 and rng.random() < 0.2:
        small = pick(rng, (15, 30))
    words = f"{counted(large, large_name)} and {counted(small, small_name)}"
    said = pick(rng, (words, words.replace(" and ", " ", 1)))
    if first == 1 and small in (15, 30) and large > 1:
        quarter = f"{cardinal(large)} hours and a quarter"
        said = pick(rng, (words, quarter if small == 15 else f"{cardinal(large)} and a half hours"))
    return Form("duration", words, said, f"{large} {large_sign} {small} {small_sign}")


def draw_money(rng: random.Random) -> Form:
    code = pick(rng, tuple(CURRENCIES))
    whole_name, part_name, parts_name = CURRENCIES[code]
    whole, part = 1 + below(rng, 99), below(rng, 100)
    if rng.random() < 0.1:
        part = 0
    words = counted(whole, whole_name) + (f" and {counted(part, part_name, parts_name)}" if part else "")
    said = f"{counted(whole, whole_name)} {cardinal(part)}" if part > 9 and rng.random() < 0.3 else words
    return Form("money", words, said, f"{code} {whole}.{part:02d}")


def draw_position(rng: random.Random) -> Form:
    side = pick(rng, ("north", "south", "east", "west"))
    degrees = 1 + below(rng, 89 if side in ("north", "south") else 179)
    minutes = 1 + below(rng, 59)
    words = f"{counted(degrees, 'degree')} and {counted(minutes, 'minute')} {side}"
    said = pick(rng, (words, words.replace(" and ", " ", 1) if degrees < 100 else words))
    return Form("position", words, said, f"{degrees}°{minutes:02d}'{side[0].upper()}")


KINDS: dict[str, Callable[[random.Random], Form]] = {
    "date": draw_date,
    "time": draw_time,
    "number": draw_number,
    "duration": draw_duration,
    "money": draw_money,
    "position": draw_position,
}


def draw(rng: random.Random, kind: str, *, reserved: bool | None) -> Form:
    """A value of `kind`; `reserved` chooses from the held-out slice (True), the rest (False) or all of them (None)."""
    while True:
        form = KINDS[kind](rng)
        if reserved is None or form.reserved == reserved:
            return form
