"""The words of the demo model's small world."""

from __future__ import annotations

import random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


HE = _words(
    "Tom Ben David Felix Henry Jack Leo Noah Paul Sam Victor Max Oscar Adam Hugo Karl Mark Peter Simon Luis"
)
SHE = _words(
    "Anna Clara Emma Grace Ida Kate Mia Olivia Rosa Tina Wendy Nina Lily Eva Julia Laura Nora Ruth Sara Zoe"
)
NAMES = HE + SHE
CITIES = _words(
    "Oslo Paris Berlin Rome Madrid London Vienna Prague Dublin Lisbon Athens Warsaw Tokyo Cairo Lima Delhi"
    " Boston Chicago Toronto Sydney Milan Munich Geneva Zurich Lyon Porto Seoul Dallas Denver Hamburg Naples"
    " Nairobi Quito Havana Bergen Bristol Leeds Kyoto Austin Miami Bern"
)
JOBS = _words("teacher doctor baker nurse driver painter farmer lawyer pilot cook singer writer plumber")
COLOURS = _words("red blue green yellow black white brown purple pink grey")
PETS = _words("dog cat rabbit hamster parrot horse turtle goldfish")
LANGUAGES = _words("French German Spanish Italian Polish Greek Dutch Danish Swedish Finnish Czech Turkish")
THINGS = tuple(
    (one, f"{one}s")
    for one in _words(
        "apple pear orange lemon banana book pen pencil egg coin card stamp ball marble sticker cookie cake"
        " flower shell stone button cup plate spoon ticket toy bottle nut plum melon carrot onion"
    )
)
"""Singular and plural of what is counted and sold."""
WORDS = _words(
    "apple bread chair desk eagle fish garden house island jacket kite lamp moon nest ocean paper queen river"
    " stone table umbrella violin window yard zebra bear cloud door engine forest glass hat ink juice key"
    " leaf music night owl plant"
)
WEEKDAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
SYLLABLES = _words(
    "ba be bo da de do fa ga go ka ke ko la le lo ma me mi na ne no ra re ro sa so ta ti to va vi zu"
)


def invent(rng: random.Random) -> str:
    """A word that nobody has seen, so that copying it needs reading."""
    return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 3))).capitalize()


def pronoun(name: str) -> str:
    """`he` or `she`, or `they` for an invented name."""
    return "he" if name in HE else "she" if name in SHE else "they"


def pick_name(rng: random.Random, names: tuple[str, ...], invented: float = 0.15) -> str:
    """One of the names, or an invented one with this chance."""
    return invent(rng) if rng.random() < invented else rng.choice(names)
