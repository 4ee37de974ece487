"""Skills of talk: greetings, what the model is, and "I do not know" for everything else."""

from __future__ import annotations

import random
from collections.abc import Sequence

from demo_skills import Example, ask
from demo_texts import Domain
from demo_words import CITIES, JOBS, NAMES, PETS, WORDS, pick_name
from skills_tools import INTENTS, write_request

ABOUT_ME = "I am the demo model of moesaic, a very small mixture of experts."
ABILITIES = "I can do small sums, prices, dates and lists, extract JSON, write short Python and call tools."
UNKNOWN = "I do not know. I only know small sums, prices, dates, lists, JSON, short Python and tools."
HELLO = "Hello! What can I do for you?"
WELCOME = "You are welcome."
BYE = "Goodbye!"
FINE = "I am fine, thank you. What can I do for you?"

TALK: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        HELLO,
        (
            "Hello",
            "Hi",
            "Hey",
            "Good morning",
            "Good evening",
            "Good day",
            "Hello there",
            "Hi there",
            "Greetings",
        ),
    ),
    (FINE, ("How are you", "How are you today", "How do you do", "Are you well", "How is it going")),
    (
        ABOUT_ME,
        ("Who are you", "What are you", "What is your name", "Tell me about yourself", "Introduce yourself"),
    ),
    (ABOUT_ME, ("Are you a human", "Are you a robot", "Which model are you", "Who am I talking to")),
    (
        ABILITIES,
        ("What can you do", "What do you know", "How can you help me", "What are you good at", "Help"),
    ),
    (WELCOME, ("Thank you", "Thanks", "Many thanks", "Thank you very much", "Thanks a lot", "That helped")),
    (BYE, ("Goodbye", "Bye", "See you", "Good night", "See you later", "Bye bye")),
)
"""Answers, and what people say before them."""
OPENINGS = ("", "Hello, ", "Hi! ", "Please: ", "Excuse me, ", "Well, ", "Hey, ")

FACTS = (
    "What is the capital of {city}?",
    "How many people live in {city}?",
    "Who is the mayor of {city}?",
    "Who wrote the book {word}?",
    "Who invented the {word}?",
    "Tell me about the history of {city}.",
    "What is a {word}?",
    "Explain how a {word} works.",
    "Why is the {word} so old?",
    "Write a poem about a {word}.",
    "Write a story about {name} and a {pet}.",
    "What does {name} think of the {word}?",
    "When was {name} born?",
    "How old is {name}?",
    "How do I become a {job}?",
    "How much does a {job} earn?",
    "How long does a {pet} live?",
    "What should I feed my {pet}?",
    "Where can I buy a {word}?",
    "Is the {word} better than the {other}?",
    "What is the meaning of {word}?",
    "Recommend a film about {city}.",
    "Who won the game in {city}?",
    "How far is it from {city} to {city2}?",
)
"""Questions about the world. No answer to them is in the training texts."""


def draw_talk(rng: random.Random) -> Example:
    """A greeting, a question about the model, thanks or a goodbye."""
    answer, phrases = rng.choice(TALK)
    phrase, opening = rng.choice(phrases), rng.choice(OPENINGS)
    is_plain = rng.random() < 0.3
    if is_plain:
        return ask(phrase + rng.choice(("", ".", "!", "?")), answer, is_common=True)
    tail = rng.choice(("", "", f", {pick_name(rng, NAMES, 0.3)}")) + rng.choice(("", ".", "!", "?"))
    return ask(f"{opening}{phrase[0].lower() + phrase[1:] if opening else phrase}{tail}", answer)


class UnknownQuestions:
    """Draws questions that the model cannot answer, from templates and from given texts."""

    def __init__(self, questions: Sequence[str] = ()) -> None:
        self._questions = questions

    def __call__(self, rng: random.Random) -> Example:
        """One question with the answer that the model does not know."""
        if self._questions and rng.random() < 0.6:
            return ask(rng.choice(self._questions), UNKNOWN)
        if rng.random() < 0.3:
            return ask(write_request(rng, rng.choice(INTENTS))[0], UNKNOWN)
        word, other = rng.sample(WORDS, 2)
        words = {
            "city": pick_name(rng, CITIES),
            "city2": pick_name(rng, CITIES),
            "word": word,
            "other": other,
        }
        words |= {"name": pick_name(rng, NAMES), "pet": rng.choice(PETS), "job": rng.choice(JOBS)}
        return ask(rng.choice(FACTS).format(**words), UNKNOWN)


def unknown_questions(domains: Sequence[Domain]) -> UnknownQuestions:
    """Questions about the headings of the prose and the hard problems of the maths texts."""
    asked = [question for domain in domains for text in domain.train for question in text.questions]
    return UnknownQuestions([question for question in asked if len(question) <= 400])
