"""Skills with small numbers: sums in words, prices, days, months and hours."""

from __future__ import annotations

import random

from demo_skills import Example, ask
from demo_words import MONTHS, NAMES, THINGS, WEEKDAYS, pick_name, pronoun

DAYS_IN_MONTH = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def count_of(number: int, thing: tuple[str, str]) -> str:
    """A number with its noun, as `1 apple` or `3 apples`."""
    return f"{number} {thing[0] if number == 1 else thing[1]}"


def bare_sum(rng: random.Random) -> Example:
    """A sum, a difference, a product or a quotient of two small numbers."""
    sign = rng.choice("+-x/")
    if sign in "+-":
        one, two = rng.randint(0, 20), rng.randint(0, 20)
        one, two = (max(one, two), min(one, two)) if sign == "-" else (one, two)
        result = one + two if sign == "+" else one - two
    else:
        two, factor = rng.randint(1, 10), rng.randint(1, 10)
        one, result = (factor, factor * two) if sign == "x" else (factor * two, factor)
    words = {"+": "plus", "-": "minus", "x": "times", "/": "divided by"}
    middle = rng.choice((sign, words[sign], "*" if sign == "x" else sign))
    form = rng.choice(("What is {}?", "Calculate {}.", "How much is {}?", "{} = ?", "{}"))
    return ask(form.format(f"{one} {middle} {two}"), f"{one} {sign} {two} = {result}.")


def sum_in_words(rng: random.Random) -> Example:
    """Somebody has things and gets or gives some; the answer shows the sum."""
    name, thing = pick_name(rng, NAMES, 0.05), rng.choice(THINGS)
    friend = rng.choice([other for other in NAMES if other != name])
    one, two = rng.randint(2, 20), rng.randint(1, 20)
    kind = rng.choice(("gets", "gives", "both", "bags", "twice"))
    has = f"{name} has {count_of(one, thing)}"
    who = rng.choice((name, pronoun(name)))
    does = "do" if who == "they" else "does"
    many = f"How many {thing[1]} {does} {who} have{rng.choice((' now', '', ' in total'))}?"
    many = rng.choice((many, many, "How many?", "How many now?"))
    if kind == "gets":
        how = rng.choice(("gets {} more", "buys {} more", "buys {}", "finds {}", f"gets {{}} from {friend}"))
        text, sums, result = f"{has} and {how.format(two)}. {many}", f"{one} + {two}", one + two
    elif kind == "gives":
        two = rng.randint(1, one)
        how = rng.choice(("gives {} away", f"gives {{}} to {friend}", "loses {}", "sells {}"))
        text, sums, result = f"{has} and {how.format(two)}. {many}", f"{one} - {two}", one - two
    elif kind == "both":
        text = f"{has} and {friend} has {two}. How many {thing[1]} do they have together?"
        total = one + two
        return ask(text, f"{one} + {two} = {total}. Together they have {count_of(total, thing)}.")
    elif kind == "bags":
        one, two = rng.randint(2, 10), rng.randint(2, 10)
        box = rng.choice(("bags", "boxes", "baskets"))
        text = f"{name} has {one} {box} with {two} {thing[1]} each. How many {thing[1]} is that?"
        sums, result = f"{one} x {two}", one * two
    else:
        text = f"{has}. {friend} has twice as many. How many {thing[1]} does {friend} have?"
        sums, result, name = f"{one} x 2", one * 2, friend
    return ask(text, f"{sums} = {result}. {name} has {count_of(result, thing)}.")


def two_steps(rng: random.Random) -> Example:
    """Somebody gets some things and then gives some away."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    one, two = rng.randint(2, 20), rng.randint(1, 10)
    three = rng.randint(1, min(10, one + two))
    text = f"{name} has {count_of(one, thing)}, buys {two} more and gives {three} away. How many are left?"
    middle, result = one + two, one + two - three
    answer = f"{one} + {two} = {middle}, {middle} - {three} = {result}. {name} has {count_of(result, thing)}."
    return ask(text, answer)


def draw_sums(rng: random.Random) -> Example:
    """Any example of the skill `sums`."""
    return rng.choice((bare_sum, sum_in_words, sum_in_words, two_steps))(rng)


def draw_prices(rng: random.Random) -> Example:
    """Totals, unit prices, change and the price of two goods."""
    kind, money = rng.choice(("total", "unit", "change", "two")), rng.choice(("euros", "dollars"))
    (one, many), price, count = rng.choice(THINGS), rng.randint(2, 10), rng.randint(2, 10)
    total = price * count
    article = "An" if one[0] in "aeiou" else "A"
    if kind == "total":
        asked = rng.choice((f"How much do {count} {many} cost?", f"What do {count} {many} cost?"))
        answer = f"{count} x {price} = {total}. {count} {many} cost {total} {money}."
        return ask(f"{article} {one} costs {price} {money}. {asked}", answer)
    if kind == "unit":
        asked = rng.choice((f"How much does one {one} cost?", f"What is the price of one {one}?"))
        answer = f"{total} / {count} = {price}. One {one} costs {price} {money}."
        return ask(f"{count} {many} cost {total} {money}. {asked}", answer)
    name = rng.choice(NAMES)
    if kind == "change":
        note = rng.choice((10, 20))
        cost = rng.randint(1, note - 1)
        text = f"{name} buys {article.lower()} {one} for {cost} {money} and pays with {note} {money}."
        rest = note - cost
        answer = f"{note} - {cost} = {rest}. {name} gets {rest} {money} back."
        return ask(f"{text} How much change does {name} get?", answer)
    other = rng.choice([thing[0] for thing in THINGS if thing[0] != one])
    first, second = rng.randint(1, 20), rng.randint(1, 20)
    other_article = "an" if other[0] in "aeiou" else "a"
    text = f"{article} {one} costs {first} {money} and {other_article} {other} costs {second} {money}."
    answer = f"{first} + {second} = {first + second}. Together they cost {first + second} {money}."
    return ask(f"{text} How much do they cost together?", answer)


def _step(start: int, step: int, size: int) -> tuple[int, str]:
    """The place on a circle of `size` after `step`, counted from 1, and the sums that lead there."""
    place = start + step
    shown = f"{start} {'+' if step >= 0 else '-'} {abs(step)} = {place}"
    if place > size:
        shown, place = f"{shown}, {place} - {size} = {place - size}", place - size
    elif place < 1:
        return place + size, f"{start} + {size} = {start + size}, {start + size} - {-step} = {place + size}"
    return place, shown


def move_day(rng: random.Random) -> Example:
    """The weekday some days after or before a weekday."""
    start, step = rng.randint(1, 7), rng.choice((1, -1)) * rng.randint(1, 7)
    day, count = WEEKDAYS[start - 1], count_of(abs(step), ("day", "days"))
    asked = f"What day is {count} {'after' if step > 0 else 'before'} {day}?"
    if rng.random() < 0.5:
        when = f"in {count}" if step > 0 else f"{count} ago"
        verb = "will it be" if step > 0 else "was it"
        asked = rng.choice((f"Today is {day}.", f"It is {day} today.", f"If today is {day}:"))
        asked = f"{asked} What day {verb} {when}?"
    place, shown = _step(start, step, 7)
    return ask(asked, f"{day} is day {start}. {shown}. Day {place} is {WEEKDAYS[place - 1]}.")


def move_month(rng: random.Random) -> Example:
    """The month some months after or before a month."""
    start, step = rng.randint(1, 12), rng.choice((1, -1)) * rng.randint(1, 11)
    month, count = MONTHS[start - 1], count_of(abs(step), ("month", "months"))
    asked = f"{rng.choice(('What', 'Which'))} month is {count} {'after' if step > 0 else 'before'} {month}?"
    if rng.random() < 0.5:
        when = f"will it be in {count}" if step > 0 else f"was it {count} ago"
        asked = f"It is {month}. {rng.choice(('What', 'Which'))} month {when}?"
    place, shown = _step(start, step, 12)
    return ask(asked, f"{month} is month {start}. {shown}. Month {place} is {MONTHS[place - 1]}.")


def move_hour(rng: random.Random) -> Example:
    """The hour of a 24-hour clock some hours later."""
    start, step = rng.randint(1, 24), rng.randint(1, 12)
    place, shown = _step(start, step, 24)
    who = pick_name(rng, NAMES, 0.05)
    count = count_of(step, ("hour", "hours"))
    asked = rng.choice(
        (
            f"It is {start} o'clock. What time is it in {count}?",
            f"{who} leaves at {start} o'clock and travels for {count}. When does {who} arrive?",
            f"{who} starts work at {start} o'clock and works for {count}. When does {who} stop?",
        )
    )
    return ask(asked, f"{shown}. It is {place} o'clock.")


def name_neighbour(rng: random.Random) -> Example:
    """The next or previous day or month, or the length of a month."""
    names, kind = rng.choice(((WEEKDAYS, "day"), (MONTHS, "month")))
    place = rng.randrange(len(names))
    if kind == "month" and rng.random() < 0.5:
        asked = rng.choice(("How many days does {} have?", "How many days are in {}?", "How long is {}?"))
        answer = f"{names[place]} has {DAYS_IN_MONTH[place]} days."
        return ask(asked.format(names[place]), answer)
    word, step = rng.choice((("after", 1), ("before", -1)))
    asked = rng.choice((f"What {kind} comes", f"Which {kind} comes", f"Tell me the {kind} that comes"))
    mark = "." if asked.startswith("Tell") else "?"
    result = names[(place + step) % len(names)]
    return ask(f"{asked} {word} {names[place]}{mark}", f"{result} comes {word} {names[place]}.")


def draw_dates(rng: random.Random) -> Example:
    """Any example of the skill `dates`."""
    kinds = (move_day, move_day, move_month, move_month, move_hour, name_neighbour)
    return rng.choice(kinds)(rng)
