"""The small world of the demo texts: words, names and fact tables."""

from __future__ import annotations

from dataclasses import dataclass

NAMES = (
    "Mira Tomas Lena Oskar Nadia Felix Ivy Hugo Clara Ruben Sofia Emil Greta Pavel Anna Jonas Tessa Marek "
    "Olga Victor Rosa Nils Dora Simon"
).split()

WORDS = (
    "ant apple arm bag ball band bank barn bean bear bed bee bell belt bird boat body bone book boot bowl box boy "
    "brain bread brick broom brush bus cake camp cap car card cart cat chair chalk chest clay clock cloth cloud "
    "coal coat coin comb corn cow crab crown cup dawn day deer desk dish dog door dot dove drum duck dust eagle ear "
    "earth egg elm eye face farm feast fern field fig film fire fish flag flame floor flour fog foot fork fox frog "
    "fruit game gate ghost gift glass glove goat gold goose grain grape grass green hail hair hall hand harp hat "
    "hawk heart hen herb hill home honey hood hook horn horse hour house ice ink iron jam jar jaw jewel juice key "
    "kite knee knife knot lake lamb lamp land lane leaf lemon light lily lime lion lock log lunch map mask meal "
    "melon milk mill mint moon moss moth mouse mouth mud music nail neck nest net night nose nut oak oat ocean oil "
    "olive onion oven owl paint palm pan paper path peach pear pearl pen piano pie pig pin pine pipe plant plate "
    "plum pond pot quilt rain raven rice ring river road robin rock roof room root rope rose rug sail salt sand "
    "scarf school seal seat seed sheep shell ship shirt shoe shop silk silver skin sky snail snow soap sock soil "
    "song soup spoon star steam stem step stone stool storm straw sugar sun swan table tail tea tent tiger tile "
    "toad toast torch towel tower town toy train tray tree truck tulip van vase veil wagon wall watch water wave "
    "wax web whale wheat wheel wind wing wolf wood wool worm yard zebra"
).split()

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
PLANETS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()


@dataclass(frozen=True)
class FactTable:
    """Table of (key, value) pairs, with statements for the corpus and wordings for the instructions."""

    name: str
    columns: tuple[str, str]
    rows: list[tuple[str, str]]
    prose: list[str]
    asks: list[str | tuple[str, str]]


def pairs(text: str) -> list[tuple[str, str]]:
    """Parse 'a b, c d' to [('a', 'b'), ('c', 'd')]; an underscore stands for a space within a name."""
    return [tuple(part.replace("_", " ") for part in item.split()) for item in text.split(",")]


def pair_with_next(order: list[str]) -> list[tuple[str, str]]:
    """Pair each member of a cycle with the next one."""
    return list(zip(order, order[1:] + order[:1]))


def swap(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(value, key) for key, value in rows]


CAPITALS = pairs(
    "France Paris, Italy Rome, Spain Madrid, Portugal Lisbon, Germany Berlin, Austria Vienna, Poland Warsaw, "
    "Greece Athens, Norway Oslo, Egypt Cairo, Japan Tokyo, China Beijing, Peru Lima, Canada Ottawa"
)
SYMBOLS = pairs(
    "hydrogen H, helium He, carbon C, nitrogen N, oxygen O, sodium Na, iron Fe, copper Cu, silver Ag, gold Au"
)
OPPOSITES = pairs(
    "hot cold, big small, fast slow, high low, old new, light dark, wet dry, full empty, long short, hard soft, "
    "early late, near far"
)

FACTS = [
    FactTable(
        "capital", ("country", "capital"), CAPITALS,
        ["The capital of {key} is {value}.", "{value} is the capital city of {key}.",
         "The government of {key} sits in {value}, its capital.",
         "Travellers to {key} often begin in the capital, {value}.",
         "On the map of {key}, a star marks the capital ({value})."],
        ["What is the capital of {key}?", "Name the capital city of {key}.", "Which city is the capital of {key}?",
         "Give the capital of {key}.", ("Name the capital of this country.", "{key}"),
         ("Which city is the capital of the given country?", "{key}"), ("Give the capital city.", "{key}")],
    ),
    FactTable(
        "country", ("capital", "country"), swap(CAPITALS),
        ["{key} is the capital of {value}.", "A visitor who stands in {key} stands in {value}.",
         "The city of {key} lies in {value}.", "{key} belongs to one country ({value})."],
        ["Which country has {key} as its capital?", "In which country is {key}?",
         "Name the country whose capital is {key}.",
         ("Name the country of this capital.", "{key}"), ("In which country is this city?", "{key}"),
         ("Which country does this capital belong to?", "{key}")],
    ),
    FactTable(
        "sound", ("animal", "sound"),
        pairs("dog bark, cat meow, cow moo, sheep bleat, duck quack, horse neigh, lion roar, frog croak, owl hoot, "
              "bee buzz, wolf howl, pig oink"),
        ["The sound of a {key} is a {value}.", "When a {key} calls, people hear a {value}.",
         "A {key} makes itself known with a {value}.", "Children who play the {key} say \"{value}\"."],
        ["What sound does a {key} make?", "Name the sound of a {key}.", "Which sound belongs to a {key}?",
         "What does a {key} sound like?", ("Name the sound this animal makes.", "{key}"),
         ("Which sound does the animal make?", "{key}")],
    ),
    FactTable(
        "legs", ("animal", "legs"),
        pairs("dog 4, cat 4, cow 4, horse 4, lion 4, frog 4, duck 2, owl 2, hen 2, bee 6, ant 6, moth 6, "
              "spider 8, crab 10"),
        ["A {key} has {value} legs.", "Count the legs of a {key} and the total is {value}.",
         "The number of legs on a {key} is {value}.", "Every healthy {key} has {value} legs."],
        ["How many legs does a {key} have?", "Give the number of legs of a {key}.", "Count the legs of a {key}.",
         "How many legs are there on a {key}?", ("How many legs does this animal have?", "{key}"),
         ("Give the number of legs.", "{key}")],
    ),
    FactTable(
        "young", ("animal", "young"),
        pairs("dog puppy, cat kitten, cow calf, sheep lamb, duck duckling, horse foal, lion cub, frog tadpole, "
              "pig piglet, hen chick, goat kid, deer fawn"),
        ["A young {key} is called a {value}.", "The {value} grows up to be a {key}.",
         "A {key} looks after its young, the {value}.", "The name for a baby {key} is \"{value}\"."],
        ["What is a young {key} called?", "Name the young of a {key}.", "What do people call a baby {key}?",
         "Give the word for a young {key}.", ("What is the young of this animal called?", "{key}"),
         ("Name the baby of the animal.", "{key}")],
    ),
    FactTable(
        "colour", ("thing", "colour"),
        pairs("bananas yellow, lemons yellow, grass green, frogs green, snow white, milk white, coal black, "
              "ravens black, blood red, cherries red, sky blue, ocean blue, carrots orange, soil brown, ash grey"),
        ["The colour of {key} is {value}.", "Painters reach for {value} when they paint {key}.",
         "The picture book uses {value} for {key}.", "For {key} the usual colour word is \"{value}\"."],
        ["What is the colour of {key}?", "Which colour belongs to {key}?", "Name the usual colour of {key}.",
         "Give the colour of {key}.", ("What colour is this?", "{key}"), ("Name the usual colour.", "{key}")],
    ),
    FactTable(
        "opposite", ("word", "opposite"), OPPOSITES + swap(OPPOSITES),
        ["The opposite of {key} is {value}.", "If a thing is not {key}, it may be {value}.",
         "People who say {key} when they mean {value} say the opposite.",
         "Against \"{key}\" the table sets \"{value}\"."],
        ["What is the opposite of {key}?", "Give the opposite of \"{key}\".", "Which word means the opposite of {key}?",
         "Name the opposite of the word {key}.", ("Give the opposite of this word.", "{key}"),
         ("Which word is the opposite?", "{key}")],
    ),
    FactTable(
        "plural", ("one", "many"),
        pairs("mouse mice, goose geese, foot feet, tooth teeth, man men, woman women, child children, sheep sheep, "
              "leaf leaves, wolf wolves, knife knives, box boxes, dish dishes, cat cats, dog dogs, book books, "
              "tree trees"),
        ["The plural of {key} is {value}.", "One {key} joins another, and there are two {value}.",
         "For more than one {key} the right form is \"{value}\".", "A single {key} becomes several {value}."],
        ["What is the plural of {key}?", "Give the plural of \"{key}\".", "Write the plural form of {key}.",
         "Make the word {key} plural.", ("Write the plural.", "{key}"),
         ("Give the plural form of this word.", "{key}")],
    ),
    FactTable(
        "next_day", ("day", "next day"), pair_with_next(DAYS),
        ["The day after {key} is {value}.", "{key} is followed by {value}.", "When {key} ends, {value} begins.",
         "After {key} the calendar shows the next day ({value})."],
        ["Which day comes after {key}?", "What is the day after {key}?", "Name the day that follows {key}.",
         "If today is {key}, which day is tomorrow?", ("Name the next day.", "{key}"), ("Which day follows?", "{key}")],
    ),
    FactTable(
        "previous_day", ("day", "day before"), swap(pair_with_next(DAYS)),
        ["The day before {key} is {value}.", "{key} is preceded by {value}.", "One day earlier than {key} is {value}.",
         "Before {key} the calendar shows the day before ({value})."],
        ["Which day comes before {key}?", "What is the day before {key}?", "Name the day that precedes {key}.",
         "If today is {key}, which day was yesterday?", ("Name the day before.", "{key}")],
    ),
    FactTable(
        "next_month", ("month", "next month"), pair_with_next(MONTHS),
        ["The month after {key} is {value}.", "{key} is followed by {value}.", "When {key} is over, {value} begins.",
         "After {key} the calendar turns to the next month ({value})."],
        ["Which month comes after {key}?", "What is the month after {key}?", "Name the month that follows {key}.",
         "Give the month right after {key}.", ("Name the next month.", "{key}"), ("Which month follows?", "{key}")],
    ),
    FactTable(
        "month_number", ("month", "number"), [(month, str(i + 1)) for i, month in enumerate(MONTHS)],
        ["{key} is month number {value}.", "In dates, {key} is written as {value}.",
         "The number of the month {key} is {value}.",
         "Counting from January, {key} has the number {value}."],
        ["What is the number of the month {key}?", "Which number does the month {key} have?",
         "Give the month number of {key}.",
         ("Give the number of this month.", "{key}"), ("Which month of the year is it, as a number?", "{key}")],
    ),
    FactTable(
        "symbol", ("element", "symbol"), SYMBOLS,
        ["The chemical symbol of {key} is {value}.", "Chemists write {value} for {key}.",
         "In the table of elements, {key} has the symbol {value}.", "The short sign for {key} is \"{value}\"."],
        ["What is the chemical symbol of {key}?", "Give the symbol of {key}.", "Which symbol stands for {key}?",
         "How do chemists write {key} as a symbol?", ("Give the chemical symbol.", "{key}"),
         ("Which symbol does this element have?", "{key}")],
    ),
    FactTable(
        "planet", ("place", "planet"), list(zip(ORDINALS, PLANETS)),
        ["The {key} planet from the Sun is {value}.", "{value} is the {key} planet from the Sun.",
         "Counting outward from the Sun, the {key} planet is {value}.",
         "In {key} place from the Sun comes one planet ({value})."],
        ["Which planet is the {key} from the Sun?", "Name the {key} planet from the Sun.",
         "What is the {key} planet of the Solar System?", "Counting from the Sun, which planet is {key}?",
         ("Name the planet at this place from the Sun.", "{key}")],
    ),
    FactTable(
        "measure", ("whole", "parts"),
        [("days in a week", "7"), ("hours in a day", "24"), ("minutes in an hour", "60"), ("seconds in a minute", "60"),
         ("months in a year", "12"), ("eggs in a dozen", "12"), ("corners in a triangle", "3"),
         ("corners in a square", "4"), ("letters in the alphabet", "26")],
        ["The number of {key} is {value}.", "There are {value} {key}.", "Count the {key} and you reach {value}.",
         "Everybody in the valley knows the number of {key} ({value})."],
        ["How many {key} are there?", "Give the number of {key}.", "Tell me the number of {key}.", "Count the {key}.",
         ("How many are there?", "{key}"), ("Give the number.", "{key}")],
    ),
]
