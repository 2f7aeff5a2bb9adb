"""Computed skills: each samples operands with one right answer, and words them as prose or as an instruction."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from world import CONSONANTS, MONTHS, NAMES, VOWELS, WORDS

Ask = str | tuple[str, str]


@dataclass(frozen=True)
class Skill:
    name: str
    category: str
    sample: Callable[[Random], dict[str, object]]  # the operands and "answer"
    prose: list[str]
    asks: list[Ask]  # an instruction, or (instruction, input)
    is_knowledge: bool = False  # the corpus states it for all operands, like facts


def is_held_out(*key: object) -> bool:
    """True for one operand choice in eight, which is for the held-out rows. A hash decides, so no list is stored."""
    digest = hashlib.sha256("|".join(str(part) for part in key).encode()).digest()
    return digest[0] % 8 == 0


def has_held_out_operands(skill: Skill, values: dict[str, object]) -> bool:
    """True if the operands are held out, in any order: 3 + 8 and 8 + 3 are held out together."""
    return is_held_out(skill.name, *sorted(str(value) for key, value in values.items() if key != "answer"))


# ---- arithmetic ----

def sample_sum(rng: Random) -> dict:
    a, b = rng.randint(1, 30), rng.randint(1, 30)
    return {"a": a, "b": b, "answer": a + b}


def sample_difference(rng: Random) -> dict:
    b, answer = rng.randint(1, 30), rng.randint(1, 30)
    return {"a": b + answer, "b": b, "answer": answer}


def sample_double(rng: Random) -> dict:
    a = rng.randint(1, 50)
    return {"a": a, "answer": 2 * a}


def sample_times_ten(rng: Random) -> dict:
    a, b = rng.randint(2, 99), rng.choice((10, 100))
    return {"a": a, "b": b, "answer": a * b}


def sample_compare(choose: Callable) -> Callable[[Random], dict]:
    def sample(rng: Random) -> dict:
        a, b = rng.sample(range(1, 100), 2)
        return {"a": a, "b": b, "answer": choose(a, b)}

    return sample


def sample_parity(rng: Random) -> dict:
    a = rng.randint(1, 500)
    return {"a": a, "answer": "odd" if a % 2 else "even"}


ARITHMETIC = [
    Skill("add", "arithmetic", sample_sum,
          ["If you add {a} to {b} you reach {answer}.", "{a} and {b} make {answer} together.",
           "The sum of {a} and {b} is {answer}.",
           "{name} had {a} pears and picked {b} more, so now there are {answer}.", "{a} + {b} = {answer}.",
           "Adding {a} and {b} gives {answer}.", "{name} wrote \"{a} + {b}\" on the board and below it \"{answer}\"."],
          ["Add {a} and {b}.", "What is {a} + {b}?", "What is the sum of {a} and {b}?", "Compute {a} plus {b}.",
           "How much is {a} and {b} together?", ("Add the two numbers.", "{a} and {b}"),
           ("Compute the sum.", "{a} + {b}"),
           ("What do these numbers add up to?", "{a}, {b}")], is_knowledge=True),
    Skill("subtract", "arithmetic", sample_difference,
          ["If you take {b} from {a} you are left with {answer}.", "{a} minus {b} is {answer}.",
           "{a} - {b} = {answer}.",
           "{name} had {a} coins and spent {b}, so {answer} are left.",
           "The difference between {a} and {b} is {answer}.",
           "Subtracting {b} from {a} gives {answer}.",
           "{name} wrote \"{a} - {b}\" on the board and below it \"{answer}\"."],
          ["Subtract {b} from {a}.", "What is {a} - {b}?", "Compute {a} minus {b}.", "Take {b} away from {a}.",
           "What is left when {b} is taken from {a}?", ("Compute the difference.", "{a} - {b}"),
           ("Subtract the second number from the first.", "{a}, {b}")], is_knowledge=True),
    Skill("double", "arithmetic", sample_double,
          ["Twice {a} is {answer}.", "Doubling {a} gives {answer}.", "2 times {a} makes {answer}.",
           "2 * {a} = {answer}.",
           "{name} had {a} beads and doubled them to {answer}.", "The double of {a} is \"{answer}\"."],
          ["Double {a}.", "What is 2 times {a}?", "Multiply {a} by 2.", "What is twice {a}?",
           ("Double the number.", "{a}"),
           ("Multiply this number by 2.", "{a}"), ("Compute the product.", "2 * {a}")], is_knowledge=True),
    Skill("times_ten", "arithmetic", sample_times_ten,
          ["{a} times {b} is {answer}.", "Multiplying {a} by {b} gives {answer}.", "{a} * {b} = {answer}.",
           "{name} stacked {a} boxes of {b} nails, which is {answer} nails.",
           "The product of {a} and {b} is \"{answer}\"."],
          ["Multiply {a} by {b}.", "What is {a} times {b}?", "What is the product of {a} and {b}?",
           "Compute {a} * {b}.",
           ("Multiply the two numbers.", "{a} and {b}"), ("Compute the product.", "{a} * {b}")]),
    Skill("larger", "arithmetic", sample_compare(max),
          ["Of {a} and {b}, the larger is {answer}.", "Between {a} and {b}, {answer} is the bigger number.",
           "{name} compared {a} with {b} and kept the larger one, {answer}.",
           "The larger of ({a}, {b}) is \"{answer}\"."],
          ["Which number is larger, {a} or {b}?", "Which is bigger: {a} or {b}?", "Give the larger of {a} and {b}.",
           ("Give the larger number.", "{a}, {b}"), ("Which number is bigger?", "{a} or {b}")]),
    Skill("smaller", "arithmetic", sample_compare(min),
          ["Of {a} and {b}, the smaller is {answer}.", "Between {a} and {b}, {answer} is the lesser number.",
           "{name} compared {a} with {b} and kept the smaller one, {answer}.",
           "The smaller of ({a}, {b}) is \"{answer}\"."],
          ["Which number is smaller, {a} or {b}?", "Which is less: {a} or {b}?", "Give the smaller of {a} and {b}.",
           ("Give the smaller number.", "{a}, {b}"), ("Which number is less?", "{a} or {b}")]),
    Skill("parity", "arithmetic", sample_parity,
          ["The number {a} is {answer}.", "{name} counts {a} among the {answer} numbers.", "{a} is an {answer} number.",
           "Looking at its last digit, {a} is {answer}.", "On the card with {a} the word \"{answer}\" is printed."],
          ["Is {a} even or odd?", "Is the number {a} odd or even?", "Say whether {a} is even or odd.",
           ("Is this number even or odd?", "{a}"), ("Say if the number is odd or even.", "{a}")]),
]


# ---- strings ----

def sample_word(answer: Callable[[str], object]) -> Callable[[Random], dict]:
    def sample(rng: Random) -> dict:
        word = rng.choice(WORDS)
        return {"word": word, "answer": answer(word)}

    return sample


def sample_letters(answer: Callable[[list[str]], list[str]]) -> Callable[[Random], dict]:
    """Sample a spelled word, real or invented. Single letters make the task independent of how words are tokenised."""
    def sample(rng: Random) -> dict:
        word = rng.choice(WORDS)
        if rng.random() < 0.5:
            word = "".join(rng.choice(CONSONANTS + VOWELS) for _ in range(rng.randint(3, 5)))
        return {"letters": "-".join(word), "answer": "-".join(answer(list(word)))}

    return sample


def sample_repeat(rng: Random) -> dict:
    word, count = rng.choice(WORDS), rng.randint(2, 4)
    return {"word": word, "count": count, "answer": " ".join([word] * count)}


STRINGS = [
    Skill("spell", "strings", sample_word("-".join),
          ["The word {word} is spelled {answer}.", "Letter by letter, {word} is {answer}.",
           "{name} spells \"{word}\" as \"{answer}\".",
           "To spell {word}, say {answer}.", "With hyphens, \"{word}\" becomes:\n{answer}\n"],
          ["Spell the word {word} with hyphens.", "Spell \"{word}\", with a hyphen between the letters.",
           "Write {word} letter by letter with hyphens.", ("Spell the word with hyphens.", "{word}"),
           ("Put a hyphen between the letters.", "{word}")], is_knowledge=True),
    Skill("spell_upper", "strings", sample_word(lambda word: "-".join(word.upper())),
          ["In capitals the word {word} is spelled {answer}.", "In capital letters, {word} is {answer}.",
           "{name} painted \"{word}\" in upper case as \"{answer}\".", "In capitals, \"{word}\" becomes:\n{answer}\n"],
          ["Spell {word} in capital letters with hyphens.",
           "Spell \"{word}\" in upper case, with a hyphen between the letters.",
           "Write {word} letter by letter in capitals with hyphens.",
           ("Spell the word in capital letters with hyphens.", "{word}"),
           ("Spell this in upper case with hyphens.", "{word}")], is_knowledge=True),
    Skill("reverse", "strings", sample_letters(lambda letters: letters[::-1]),
          ["Written backwards, {letters} reads {answer}.", "The reverse of {letters} is {answer}.",
           "In the mirror, \"{letters}\" turns into \"{answer}\".", "From back to front, {letters} is:\n{answer}\n"],
          ["Reverse the letters {letters}.", "Write {letters} backwards.",
           "Write the letters {letters} from back to front.",
           ("Reverse the letters.", "{letters}"), ("Write these letters backwards.", "{letters}")]),
    Skill("upper", "strings", sample_letters(lambda letters: [letter.upper() for letter in letters]),
          ["In upper case, {letters} becomes {answer}.", "The letters {letters} in capitals are {answer}.",
           "{name} changed \"{letters}\" to capitals: \"{answer}\".", "In capitals, {letters} is:\n{answer}\n"],
          ["Write the letters {letters} in upper case.", "Change {letters} to capital letters.",
           "Write {letters} in capitals.",
           ("Write the letters in upper case.", "{letters}"), ("Change to capital letters.", "{letters}")]),
    Skill("first_letter", "strings", sample_word(lambda word: word[0]),
          ["The first letter of {word} is {answer}.", "The word {word} begins with {answer}.",
           "\"{word}\" starts with the letter \"{answer}\".",
           "{name} looked up {word} under the letter {answer}."],
          ["What is the first letter of {word}?", "Give the first letter of \"{word}\".",
           "Which letter does {word} begin with?",
           ("Give the first letter of the word.", "{word}"), ("Which letter does this word start with?", "{word}")],
          is_knowledge=True),
    Skill("last_letter", "strings", sample_word(lambda word: word[-1]),
          ["The last letter of {word} is {answer}.", "The word {word} ends with {answer}.",
           "\"{word}\" closes with the letter \"{answer}\".",
           "{name} noticed that {word} finishes on the letter {answer}."],
          ["What is the last letter of {word}?", "Give the last letter of \"{word}\".",
           "Which letter does {word} end with?",
           ("Give the last letter of the word.", "{word}"), ("Which letter does this word end with?", "{word}")],
          is_knowledge=True),
    Skill("letter_count", "strings", sample_word(len),
          ["The word {word} has {answer} letters.", "{name} counted the letters of {word} and found {answer}.",
           "In \"{word}\" there are {answer} letters.", "The length of {word} is \"{answer}\"."],
          ["How many letters does {word} have?", "Count the letters in \"{word}\".",
           "How long is the word {word}, in letters?",
           ("Count the letters of the word.", "{word}"), ("How many letters are there?", "{word}")], is_knowledge=True),
    Skill("repeat", "strings", sample_repeat,
          ["Said {count} times, {word} becomes {answer}.", "{name} wrote {word} {count} times: {answer}.",
           "The echo repeated \"{word}\" {count} times as \"{answer}\".",
           "Written {count} times, \"{word}\" is:\n{answer}\n"],
          ["Repeat the word {word} {count} times.", "Write \"{word}\" {count} times.", "Say {word} {count} times.",
           ("Repeat the word {count} times.", "{word}"), ("Write this word {count} times.", "{word}")]),
]


# ---- lists ----

def sample_numbers(answer: Callable[[list[int]], object], max_items: int = 4) -> Callable[[Random], dict]:
    def sample(rng: Random) -> dict:
        numbers = rng.sample(range(1, 100), rng.randint(3, max_items))
        return {"items": join_commas(numbers), "answer": answer(numbers)}

    return sample


def sample_words(answer: Callable[[list[str]], object], max_items: int = 4, separator: str = ", "
                 ) -> Callable[[Random], dict]:
    def sample(rng: Random) -> dict:
        words = rng.sample(WORDS, rng.randint(3, max_items))
        return {"items": separator.join(words), "answer": answer(words)}

    return sample


def join_commas(items: list) -> str:
    return ", ".join(str(item) for item in items)


LISTS = [
    Skill("sort", "lists", sample_numbers(lambda numbers: join_commas(sorted(numbers))),
          ["Sorted from low to high, {items} becomes {answer}.", "{name} put {items} in rising order: {answer}.",
           "The numbers ({items}) in order are ({answer}).", "In order, the list \"{items}\" is:\n{answer}\n"],
          ["Sort these numbers from low to high: {items}.", "Put the numbers {items} in rising order.",
           "Sort {items} from smallest to largest.", ("Sort the numbers.", "{items}"),
           ("Put the numbers in order, smallest first.", "{items}")]),
    Skill("largest", "lists", sample_numbers(max),
          ["The largest of {items} is {answer}.", "Among {items} no number is bigger than {answer}.",
           "{name} looked at {items} and picked the greatest, {answer}.", "The maximum of ({items}) is \"{answer}\"."],
          ["What is the largest of {items}?", "Find the maximum of {items}.", "Which number is the biggest: {items}?",
           ("Give the largest number.", "{items}"), ("Find the maximum.", "{items}")]),
    Skill("smallest", "lists", sample_numbers(min),
          ["The smallest of {items} is {answer}.", "Among {items} no number is lower than {answer}.",
           "{name} looked at {items} and picked the least, {answer}.", "The minimum of ({items}) is \"{answer}\"."],
          ["What is the smallest of {items}?", "Find the minimum of {items}.", "Which number is the lowest: {items}?",
           ("Give the smallest number.", "{items}"), ("Find the minimum.", "{items}")]),
    Skill("first_item", "lists", sample_words(lambda words: words[0]),
          ["The first item of {items} is {answer}.", "The list {items} opens with {answer}.",
           "{name} packed {items}, beginning with {answer}.", "First in ({items}) stands \"{answer}\"."],
          ["What is the first item of {items}?", "Which word comes first in this list: {items}?",
           "Give the first word of {items}.",
           ("Give the first item of the list.", "{items}"), ("Which word comes first?", "{items}")]),
    Skill("last_item", "lists", sample_words(lambda words: words[-1]),
          ["The last item of {items} is {answer}.", "The list {items} closes with {answer}.",
           "{name} packed {items}, ending with {answer}.", "Last in ({items}) stands \"{answer}\"."],
          ["What is the last item of {items}?", "Which word comes last in this list: {items}?",
           "Give the last word of {items}.",
           ("Give the last item of the list.", "{items}"), ("Which word comes last?", "{items}")]),
    Skill("item_count", "lists", sample_words(len, 6),
          ["The list {items} has {answer} items.", "{name} packed {items}, which makes {answer} things.",
           "Counting {items} gives {answer}.", "In ({items}) there are \"{answer}\" words."],
          ["How many items are in this list: {items}?", "Count the words: {items}.",
           "How many words are there in {items}?",
           ("Count the items.", "{items}"), ("How many items does the list have?", "{items}")]),
    Skill("reverse_list", "lists", sample_words(lambda words: join_commas(words[::-1])),
          ["In reverse order, {items} becomes {answer}.", "{name} turned the list {items} around: {answer}.",
           "From the end, ({items}) is ({answer}).", "Turned around, the list \"{items}\" is:\n{answer}\n"],
          ["Reverse the list {items}.", "Write this list in reverse order: {items}.", "Turn the list around: {items}.",
           ("Reverse the order of the list.", "{items}"), ("Write the list from last to first.", "{items}")]),
    Skill("join", "lists", sample_words(join_commas, separator=" "),
          ["With commas, {items} becomes {answer}.", "{name} put commas into {items} and got {answer}.",
           "Joined by commas, \"{items}\" is \"{answer}\".", "With commas, the words \"{items}\" are:\n{answer}\n"],
          ["Join these words with commas: {items}.", "Put commas between the words {items}.",
           "Separate with commas: {items}.",
           ("Join the words with commas.", "{items}"), ("Write these words as a list with commas.", "{items}")]),
]


# ---- conversions by powers of ten, which a small model can generalise to new numbers ----

UNITS = [
    ("metres", "centimetres", 100), ("kilometres", "metres", 1000), ("kilograms", "grams", 1000),
    ("litres", "millilitres", 1000), ("centimetres", "millimetres", 10), ("euros", "cents", 100),
    ("decades", "years", 10), ("centuries", "years", 100), ("tonnes", "kilograms", 1000),
]


def sample_conversion(reverse: bool) -> Callable[[Random], dict]:
    def sample(rng: Random) -> dict:
        source, target, factor = rng.choice(UNITS)
        small = rng.randint(2, 99)
        large = small * factor
        if reverse:
            return {"n": large, "source": target, "target": source, "answer": small}
        return {"n": small, "source": source, "target": target, "answer": large}

    return sample


CONVERSION_PROSE = [
    "{n} {source} are {answer} {target}.", "Measured again, {n} {source} equal {answer} {target}.",
    "{name} turned {n} {source} into {target} and wrote {answer}.", "In {target}, {n} {source} make \"{answer}\".",
]
CONVERSION_ASKS = [
    "How many {target} are {n} {source}?", "Convert {n} {source} to {target}.", "Express {n} {source} in {target}.",
    "Change {n} {source} into {target}.", ("Convert to {target}.", "{n} {source}"),
    ("How many {target} is this?", "{n} {source}"), ("Express this in {target}.", "{n} {source}"),
]
CONVERSIONS = [
    Skill("to_small_unit", "conversion", sample_conversion(False), CONVERSION_PROSE, CONVERSION_ASKS),
    Skill("to_large_unit", "conversion", sample_conversion(True), CONVERSION_PROSE, CONVERSION_ASKS),
]


# ---- formats ----

def sample_pair(layout: Callable[[str, int], str]) -> Callable[[Random], dict]:
    def sample(rng: Random) -> dict:
        name, age = rng.choice(NAMES), rng.randint(5, 90)
        return {"who": name, "age": age, "answer": layout(name, age)}

    return sample


def sample_row(rng: Random) -> dict:
    name, age, item = rng.choice(NAMES), rng.randint(5, 90), rng.choice(WORDS)
    return {"who": name, "age": age, "item": item, "answer": f"{name},{age},{item}"}


def sample_date(rng: Random) -> dict:
    day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randint(1980, 2039)
    return {"day": day, "month": MONTHS[month - 1], "year": year, "answer": f"{year}-{month:02d}-{day:02d}"}


FORMATS = [
    Skill("json", "formats", sample_pair(lambda name, age: json.dumps({"name": name, "age": age})),
          ["As a JSON object, {who} aged {age} is {answer}.", "The record of {who}, aged {age}, reads:\n{answer}\n",
           "The file keeps {who}, {age}, as {answer}.", "In JSON, name {who} and age {age} become:\n{answer}\n"],
          ["Write a JSON object with name {who} and age {age}.", "Give a JSON record: name {who}, age {age}.",
           "Make a JSON object for {who}, aged {age}, with the keys name and age.",
           ("Write this as a JSON object.", "name {who}, age {age}"),
           ("Make a JSON object with the keys name and age.", "{who}, {age}")]),
    Skill("csv", "formats", sample_row,
          ["As a CSV line, name {who}, age {age}, item {item} is {answer}.",
           "The table row of {who}, {age}, {item} reads:\n{answer}\n",
           "Without spaces, {who}, {age}, {item} is the CSV line {answer}."],
          ["Write a CSV line with {who}, {age} and {item}.", "Make a CSV row: name {who}, age {age}, item {item}.",
           "Write {who}, {age}, {item} as a CSV line.",
           ("Write this as a CSV line.", "name {who}, age {age}, item {item}"),
           ("Make a CSV row.", "{who}, {age}, {item}")]),
    Skill("iso_date", "formats", sample_date,
          ["The date {day} {month} {year} is written {answer}.", "In ISO form, {day} {month} {year} becomes {answer}.",
           "{name} stamped the letter of {day} {month} {year} with \"{answer}\".",
           "The ISO date of {day} {month} {year}:\n{answer}\n"],
          ["Write {day} {month} {year} as an ISO date.", "Give the ISO form of {day} {month} {year}.",
           "Convert {day} {month} {year} to the form YYYY-MM-DD.",
           ("Write the date in ISO form.", "{day} {month} {year}"),
           ("Convert this date to YYYY-MM-DD.", "{day} {month} {year}")]),
    Skill("bullets", "formats", sample_words(lambda words: "\n".join(f"- {word}" for word in words)),
          ["As bullets, the list {items} is:\n{answer}\n", "{name} noted {items} as a bullet list:\n{answer}\n",
           "One line each, {items} becomes:\n{answer}\n"],
          ["Write {items} as a bullet list.", "Make a bullet list of {items}.", "Turn {items} into a list with dashes.",
           ("Write this as a bullet list.", "{items}"), ("Put each item on a line with a dash.", "{items}")]),
    Skill("key_value", "formats", sample_pair(lambda name, age: f"name: {name}\nage: {age}"),
          ["As key and value lines, {who} aged {age} is:\n{answer}\n",
           "The card of {who}, aged {age}, says:\n{answer}\n",
           "Two lines describe {who}, {age}:\n{answer}\n"],
          ["Write name {who} and age {age} as key: value lines.", "Give key: value lines for name {who}, age {age}.",
           "Describe {who}, aged {age}, in key: value lines with name and age.",
           ("Write this as key: value lines.", "name {who}, age {age}"),
           ("Make key: value lines for name and age.", "{who}, {age}")]),
]

SKILLS = ARITHMETIC + STRINGS + LISTS + CONVERSIONS + FORMATS
