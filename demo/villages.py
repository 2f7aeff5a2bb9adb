"""Invented villages: articles for the corpus, and similar passages with questions for the SQuAD files."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from world import CONSONANTS, MONTHS, NAMES, VOWELS, WORDS


@dataclass(frozen=True)
class Detail:
    """Detail of a village, with sentences and questions; {value} is its value."""

    name: str
    sentences: list[str]
    questions: list[str]


DETAILS = [
    Detail("river", ["{village} lies on the river {value}, which floods every spring.",
                     "The river {value} runs past {village} and turns two wheels."],
           ["Which river runs past {village}?", "On which river does {village} lie?"]),
    Detail("houses", ["A count of the roofs in {village} gives {value}, barns left out.",
                      "{village} has {value}, most of them built of grey stone."],
           ["How many houses does {village} have?", "What is the number of houses in {village}?"]),
    Detail("founder", ["It was {value} who founded {village} after a long winter on the road.",
                       "Old letters name {value} as the founder of {village}."],
           ["Who founded {village}?", "Whom do old letters name as the founder of {village}?"]),
    Detail("year", ["The first stone of {village} was laid in {value}, on a rainy morning.",
                    "People date the beginning of {village} to {value}, when the well was dug."],
           ["In which year did {village} begin?", "When was {village} begun?"]),
    Detail("crop", ["On the slopes around {village} the farmers grow {value} and little else.",
                    "Carts loaded with {value} leave the fields of {village} every autumn."],
           ["What do the farmers of {village} grow?", "Which crop comes from the fields of {village}?"]),
    Detail("animal", ["Most families in {village} keep {value} behind the house.",
                      "Visitors to {village} are greeted by {value} that walk about freely."],
           ["Which animals do families in {village} keep?", "What animals live with the people of {village}?"]),
    Detail("festival", ["The great feast of {village} takes place in {value}, with songs until midnight.",
                        "Every {value} the people of {village} light lanterns for their feast."],
           ["In which month is the feast of {village}?", "When does {village} hold its feast?"]),
    Detail("tower", ["The tower of {village} is painted {value} so that shepherds can find it.",
                     "From far away one sees a {value} tower above {village}."],
           ["What colour is the tower of {village}?", "Which colour was chosen for the tower of {village}?"]),
    Detail("bridge", ["The only bridge of {village} is made of {value} and carries one cart at a time.",
                      "A bridge of {value} leads from {village} to the road."],
           ["What is the bridge of {village} made of?", "Which material was used for the bridge of {village}?"]),
    Detail("craft", ["In the workshops of {village} people make {value} for the whole valley.",
                     "{village} sells {value} that are known far beyond the hills."],
           ["What is made in the workshops of {village}?", "What does {village} make and sell?"]),
    Detail("teacher", ["The school of {village} is led by {value}, who also rings the bell.",
                       "Each morning {value} opens the school of {village}."],
           ["Who leads the school of {village}?", "Who is the teacher in {village}?"]),
    Detail("treasure", ["In the hall of {village} hangs {value}, a gift from the miller.",
                        "The people of {village} are proud of {value} that is kept in the hall."],
           ["What is kept in the hall of {village}?", "Of what are the people of {village} proud?"]),
]
CROPS = "barley hops rye oats flax beans onions pears plums grapes hazelnuts turnips".split()
ANIMALS = "goats geese sheep ponies hens rabbits ducks pigs".split()
COLOURS = "red white blue green yellow black orange purple".split()
MATERIALS = "oak stone iron brick rope pine granite marble".split()
CRAFTS = "baskets candles drums kites clocks boots bowls ladders combs bells".split()
ADJECTIVES = "silver wooden painted broken golden ancient tiny heavy".split()


def invent_place_name(rng: Random) -> str:
    letters = [rng.choice((CONSONANTS, VOWELS)[i % 2]) for i in range(rng.choice((5, 6, 7)))]
    return "".join(letters).capitalize()


def sample_village(rng: Random) -> dict[str, str]:
    founder, teacher = rng.sample(NAMES, 2)
    return {
        "village": invent_place_name(rng), "river": invent_place_name(rng), "houses": f"{rng.randint(20, 400)} houses",
        "founder": f"{founder} {invent_place_name(rng)}", "year": str(rng.randint(1200, 1899)),
        "crop": rng.choice(CROPS),
        "animal": rng.choice(ANIMALS), "festival": rng.choice(MONTHS), "tower": rng.choice(COLOURS),
        "bridge": rng.choice(MATERIALS), "craft": rng.choice(CRAFTS), "teacher": f"{teacher} {invent_place_name(rng)}",
        "treasure": f"the {rng.choice(ADJECTIVES)} {rng.choice(WORDS)}",
    }


def describe(village: dict[str, str], details: list[Detail], rng: Random, start: int = 0) -> tuple[str, dict[str, int]]:
    """Return sentences about a village and the offset of each value, counted from `start`."""
    text, offsets = "", {}
    for detail in details:
        prefix, suffix = rng.choice(detail.sentences).split("{value}")
        text += prefix.format(**village)
        offsets[detail.name] = start + len(text)
        text += village[detail.name] + suffix.format(**village) + " "
    return text, offsets


def write_article(rng: Random) -> str:
    village = sample_village(rng)
    return describe(village, rng.sample(DETAILS, rng.randint(4, 8)), rng)[0].strip()


def list_answers(value: str, offset: int) -> list[dict]:
    """Return the value, and its short form without a leading article or a trailing 'houses', if it has one."""
    answers = [{"text": value, "answer_start": offset}]
    if value.startswith("the "):
        answers.append({"text": value[4:], "answer_start": offset + 4})
    if value.endswith(" houses"):
        answers.append({"text": value.split()[0], "answer_start": offset})
    return answers


def sample_new_village(rng: Random, used_names: set[str]) -> dict[str, str]:
    """Return a village with new names, which are added to `used_names`."""
    while True:
        village = sample_village(rng)
        names = {village[key].split()[-1] for key in ("village", "river", "founder", "teacher")}
        if not names & used_names:
            used_names |= names
            return village


def make_passage(rng: Random, villages: int, per_village: int, title: str, part: str, used_names: set[str]) -> dict:
    """Return a paragraph with questions; a detail omitted from the passage gives an unanswerable question."""
    context, qas = "", []
    for _ in range(villages):
        village = sample_new_village(rng, used_names)
        details = rng.sample(DETAILS, len(DETAILS))
        described, omitted = details[:per_village], details[per_village:]
        text, offsets = describe(village, described, rng, len(context))
        context += text
        answerable = 4 if villages == 1 else 1
        for detail in rng.sample(described, answerable):
            answers = list_answers(village[detail.name], offsets[detail.name])
            qas.append((detail, village, answers if part == "dev" else answers[:1]))
        if villages == 1 or rng.random() < 0.25:
            qas.append((rng.choice(omitted), village, []))
    return {
        "context": context.strip(),
        "qas": [
            {"id": f"{part}-{title}-{i}", "question": rng.choice(detail.questions).format(**village),
             "answers": answers, "is_impossible": not answers}
            for i, (detail, village, answers) in enumerate(qas)
        ],
    }


def make_articles(part: str, passages: int, long_passages: int, rng: Random, used_names: set[str]) -> list[dict]:
    """Return articles of one passage: of 4 to 6 sentences, then long ones of 40 sentences on five villages."""
    articles = []
    for i in range(passages + long_passages):
        title = f"Valley_{i + 1}"
        villages, per_village = (1, rng.randint(4, 6)) if i < passages else (5, 8)
        passage = make_passage(rng, villages, per_village, title, part, used_names)
        articles.append({"title": title, "paragraphs": [passage]})
    return articles
