"""Diaries, letters and reports of a harbour, written from our own sentences and word lists.

A slot names a word list (`{ship}`) or a kind of value (`{time}`). A value stands in both ways side by side, in any of
several arrangements; `{time.words}` and `{time.exact}` place the two ways of the sentence's one value apart.
"""

from __future__ import annotations

import random
import re

from forms import Form, below, draw, listed, pick

WORDS = {
    "ship": (
        "Marigold|Ellen Tarrant|Saltwind|Grey Heron|Constance|Two Sisters|Northern Lass|Petrel|Juniper|Old Providence|"
        "Bright Anna|Kestrel|Silver Thorn|Patience|Linnet|Harvest Moon|Morning Tide|Cormorant|Lady Wenlow|Dauntless"
    ),
    "person": (
        "Mr Abel|Mrs Orrin|young Tom|old Harker|the mate|the pilot|Ida|Captain Brand|the customs man|Wren|the cook|"
        "Joss|Miss Farrow|the cooper|Bettany|the night watchman|Silas|the schoolmaster|Mrs Quill|the ferryman|Edda"
    ),
    "place": (
        "the north quay|the old slipway|Gull Rock|the fish market|the customs shed|the long pier|Cray Point|"
        "the signal hill|the rope walk|the chandler's shop|the lower basin|the lamp room|the ferry stage|Saltham|"
        "the boat yard|Merrin Sound|the weir|the coal wharf"
    ),
    "goods": (
        "barrels of herring|crates of lamp glass|sacks of barley|coils of rope|bales of wool|tins of paint|"
        "boxes of candles|planks of larch|bundles of slate|casks of oil|baskets of eels|bags of salt|cases of oranges|"
        "rolls of canvas|jars of honey|bricks|hooks|cork floats|letters|iron bolts"
    ),
    "bird": "gulls|terns|cormorants|geese|oystercatchers|swifts|a lone heron|plovers|two ravens|sandpipers",
    "weather": (
        "a thin rain|low fog|bright sun|a hard frost|a light breeze from the west|sleet|a warm haze|high cloud|"
        "a falling glass|a stiff wind from the north|drizzle|clear air|heavy swell|broken cloud|a dead calm"
    ),
    "thing": (
        "the lamp|the tide gauge|the bell|the winch|the store door|the rain gauge|the small boat|"
        "the crane|the flagstaff|"
        "the ladder|the pump|the telescope|the barometer|the stove|the weighbridge|the lock gate"
    ),
    "state": (
        "in good order|stiff with salt|badly worn|freshly painted|as we left it|leaking again|"
        "mended at last|missing a bolt|"
        "hard to turn|clean and dry"
    ),
    "task": (
        "oiled the hinges|swept the stairs|tarred the boat|mended nets|polished the lens|copied letters|split kindling|"
        "sounded the channel|painted the railings|counted stores|greased the winch|aired the blankets|filled the lamps"
    ),
    "book": "the log|the ledger|the day book|the register|the harbour book|the station book|our table",
    "mood": "tired|content|cold to the bone|in good spirits|uneasy|glad of the company|hungry|hoarse from shouting",
}
LISTS = {name: listed(words, "|") for name, words in WORDS.items()}

ABOUT = {
    "date": (
        "The {ship} was launched on {date}.|The lease of {place} runs out on {date}.|{Person} was born on {date}.|"
        "The last great storm struck {place} on {date}.|The new lamp was first lit on {date}.|"
        "A letter of {date} lay forgotten in {place}.|We expect the inspector on {date}.|"
        "{Person} signed on with the {ship} on {date}.|The chart of {place} was drawn on {date}.|"
        "The stone by {place} carries the date of {date}.|The {ship} was last painted on {date}.|"
        "{Person} still speaks of {date.words}, and {book} has that day as {date.exact}.|"
        "On {date} there was ice as far as {place}.|School begins again on {date}.|"
        "Under {date.exact} {book} has one line only; it was {date.words}, the day of the flood.|"
        "They were married on {date}, in {weather}."
    ),
    "time": (
        "The {ship} came in at {time}.|At {time} {person} rang the bell.|High water fell at {time}.|"
        "{Person} left for {place} at {time}.|We lit the lamp at {time}.|The fog lifted at {time}.|"
        "At {time} there was {weather} over {place}.|The {ship} is due at {time}.|"
        "{Person} said {time.words}; {book} says {time.exact}.|The ferry goes at {time}, and {person} missed it.|"
        "My watch ended at {time}.|Supper was late, at {time}.|We saw a light off {place} at {time}.|"
        "It was {time.words} by the church, so I wrote {time.exact}.|The lock opens at {time}.|"
        "Against {time.exact} I noted {bird}; that is {time.words}.|The post came at {time} with {person}.|"
        "Low water is at {time} by the tables."
    ),
    "number": (
        "We counted {number} {goods}.|The {ship} carries {number} {goods}.|"
        "{Person} ordered {number} {goods} for {place}.|"
        "There are {number} {goods} in {place}.|Of {goods} we have {number} left.|"
        "{Person} passed {number} on the tally.|"
        "The number painted on the {ship} is {number}.|From here to {place} it is {number} paces.|"
        "{Person} called out {number.words}, and I put down {number.exact}.|The tower key hangs on hook {number}.|"
        "The count of {bird} came to {number}.|Page {number} of {book} is torn.|Lot {number} went to {person}.|"
        "{Book} shows {number.exact} {goods}, which is {number.words}.|Our permit bears the number {number}.|"
        "It took {number} turns of the handle to raise {thing}."
    ),
    "duration": (
        "The crossing took {duration}.|{Person} was away for {duration}.|We waited {duration} for the tide.|"
        "The fog lay over {place} for {duration}.|{Person} worked on {thing} for {duration}.|"
        "It rained for {duration} without a pause.|The {ship} lay off {place} for {duration}.|"
        "The lamp burned for {duration} on one filling.|From {place} to the light is a matter of {duration}.|"
        "{Person} reckoned {duration.words}, so {book} has {duration.exact}.|The repair of {thing} cost us {duration}.|"
        "A run of {duration.exact} is {duration.words}, which is good for the {ship}.|"
        "The signal was out for {duration}.|The eclipse was over in {duration}."
    ),
    "money": (
        "{Person} paid {money} for {goods}.|The {ship} owes {money} in harbour dues.|A new rope costs {money}.|"
        "We sold the old boat for {money}.|{Person} lent me {money} until Friday.|"
        "The repair of {thing} came to {money}.|"
        "There is {money} in the tin box.|The fine for mooring at {place} is {money}.|{Person} earns {money} a week.|"
        "The bill said {money.words}, and {book} has {money.exact}.|Freight to {place} is {money}.|"
        "{Book} has {money.exact} against the {ship}, so she owes us {money.words}.|"
        "The collection for {person} reached {money}.|Lamp oil has gone up to {money}."
    ),
    "position": (
        "The {ship} was last seen at {position}.|A wreck is marked at {position}.|The shoal lies along {position}.|"
        "{Person} took a sight and found {position}.|We crossed {position} in {weather}.|"
        "The {ship} reports ice near {position}.|The buoy has drifted to {position}.|Our charts end at {position}.|"
        "{Person} read off {position.words}, which I wrote as {position.exact}.|The bank begins at {position}.|"
        "{Book} gives {position.exact}; read aloud it is {position.words}.|The whales were met at {position}.|"
        "The cable turns at {position}."
    ),
}
SENTENCES = {kind: listed(text, "|") for kind, text in ABOUT.items()}

# Dates and times, whose words occur in nothing else, come up more often than the other kinds.
COMMON = ("date", "date", "date", "time", "time", *SENTENCES)

PLAIN = listed(
    "{Thing} is {state}.|{Person} {task} while I {task}.|There was {weather} all day.|I {task} and then slept.|"
    "{Bird} came in over {place}.|{Person} is {mood}, and so am I.|We had {weather} from dawn.|"
    "{Person} brought bread from {place}.|Nobody has been to {place} this week.|{Person} asked after {thing}.|"
    "The children at {place} have seen {bird}.|I went down to {place} and {task}.|No word yet of the {ship}.|"
    "{Person} says that {thing} will last another winter.|With {weather} there is little to do but wait.|"
    "The {ship} needs a new sail.|{Person} {task} without being asked.|We found {thing} {state}.|"
    "The smell of tar hangs about {place}.|{Person} told the story of the {ship} again.|Towards evening I was {mood}.",
    "|",
)

GENRES = (
    # (openings, closings)
    (
        "Station diary, {date}.|Diary of the light, {date}.|Watch book, {date}.|{date.words}; entered as {date.exact}.|"
        "Today is {date}.|Entry for {date}, in {weather}.",
        "Nothing more today.|Lamp trimmed; all well.|So ends the watch.|To bed.|More tomorrow.|"
        "Watch handed to {person}.",
    ),
    (
        "Dear Edda, it is {time} and I am {mood}.|Dear brother, your letter of {date} is here.|"
        "Dear friend, {person} brings you this with {number} {goods}.|"
        "Dear aunt, we are well, though {weather} keeps us in.",
        "Write soon.|Your loving brother.|Greet {person} from me.|With all good wishes from {place}.|Keep well.",
    ),
    (
        "Report of the harbour office on the {ship}.|Notice to all who use {place}.|Report on {thing}, made {date}.|"
        "Minutes of the meeting, opened at {time}.|To the owners of the {ship}.",
        "Signed for the harbour office.|Copied into {book}.|Read and agreed.|{Person} has the papers.|End of report.",
    ),
    (
        "Log of the {ship}, {position}.|Log of the {ship}, {date}.|On board the {ship}, in {weather}.|"
        "The {ship}, {duration} out from {place}.",
        "Wind steady, all hands well.|Course as before.|{Person} has the deck.|Nothing else in sight.|Pumps dry.",
    ),
)
LESSONS = listed(
    "Copy book of {person}.|Exercises for the clerks of the harbour.|{Person} taught the children at {place} today.|"
    "Dictation, held at {place}.|Practice page from {book}.|Lesson in the schoolroom, with {weather} outside.",
    "|",
)
LESSON_LINES = (
    # (heading, one line)
    ("Words, then the exact form.", "{words}: {exact}"),
    ("Said and written.", "{words} is {exact}"),
    ("Heard, and put down.", "{words}, written {exact}"),
    ("Call and entry.", "{words} ({exact})"),
)
PAIRS = (
    *("{words} ({exact})",) * 2,
    "{words}, {exact} in {book},",
    "{words}, or {exact},",
    "{words}, that is {exact},",
    "{words}, written {exact},",
    "{exact} ({words})",
)
SLOT = re.compile(r"\{(\w+)(?:\.(\w+))?\}")


class Writer:
    """Fills sentences from one stream of random numbers; remembers every value that it wrote."""

    def __init__(self, rng: random.Random, *, reserved: bool | None) -> None:
        self.rng = rng
        self.reserved = reserved
        self.written: list[Form] = []

    def sentence(self, template: str) -> str:
        values: dict[str, Form] = {}

        def fill(slot: re.Match[str]) -> str:
            name, way = slot.groups()
            if name.lower() in LISTS:
                word = pick(self.rng, LISTS[name.lower()])
                return word[0].upper() + word[1:] if name[0].isupper() else word
            if name not in values:
                values[name] = draw(self.rng, name, reserved=self.reserved)
                self.written.append(values[name])
            form = values[name]
            return {"words": form.said, "exact": form.exact}[way] if way else self.pair(form)

        text = SLOT.sub(fill, template)
        text = re.sub(r",(?=[.,;)])", "", text)  # an arrangement that closes with a comma, before another mark
        return text[0].upper() + text[1:]

    def pair(self, form: Form) -> str:
        return self.arrange(form, pick(self.rng, PAIRS)).replace("{book}", pick(self.rng, LISTS["book"]))

    def arrange(self, form: Form, arrangement: str) -> str:
        words = form.words if arrangement.startswith("{exact}") else form.said
        return arrangement.replace("{words}", words).replace("{exact}", form.exact)

    def document(self) -> str:
        """A page of lessons or, as often, an entry, letter or report."""
        return self.lesson() if self.rng.random() < 0.5 else self.account()

    def lesson(self) -> str:
        """A heading and five to ten values, of one kind or mixed."""
        heading, line = pick(self.rng, LESSON_LINES)
        kinds = COMMON
        if self.rng.random() < 0.5:
            kinds = (pick(self.rng, kinds),)
        forms = [draw(self.rng, pick(self.rng, kinds), reserved=self.reserved) for _ in range(4 + below(self.rng, 4))]
        self.written.extend(forms)
        items = "; ".join(self.arrange(form, line) for form in forms)
        return f"{self.sentence(pick(self.rng, LESSONS))} {heading} {items}."

    def account(self) -> str:
        """An opening, three to six sentences, a closing."""
        openings, closings = pick(self.rng, GENRES)
        body = []
        for _ in range(2 + below(self.rng, 3)):
            plain = self.rng.random() < 0.15
            body.append(pick(self.rng, PLAIN if plain else SENTENCES[pick(self.rng, COMMON)]))
        templates = [pick(self.rng, listed(openings, "|")), *body, pick(self.rng, listed(closings, "|"))]
        return " ".join(self.sentence(template) for template in templates)
