"""Makes conversations from stories: in each turn, a user asks for a story about topics that occur in the story.

Topics, phrasings and numbers of turns are drawn from one seed, so equal stories give equal files.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError
from mlx_zip.files import atomic_file

from .lexicon import Lexicon, ends_noun, possible_singulars, split_into_words

ABOUT = (  # {} becomes one to three topics
    "Tell me a story about {}.",
    "Tell me a story about {}.",  # twice, because it is the most common request
    "Tell me a story about {}, please.",
    "Can you tell me a story about {}?",
    "Could you tell me a story about {}, please?",
    "Will you tell me a story about {}?",
    "Please tell me a story about {}.",
    "I want to hear a story about {}.",
    "I would like to hear a story about {}.",
    "I'd love a story about {}.",
    "Do you know a story about {}?",
    "Write a story about {}.",
    "Write a short story about {}.",
    "Write me a story about {}.",
    "Make up a story about {}.",
    "Tell a story about {}.",
    "Tell me a little story about {}.",
    "Tell me a bedtime story about {}.",
    "A story about {}, please.",
    "Let's have a story about {}.",
    "Give me a story about {}.",
    "Tell me about {}.",
    "Tell me a story with {} in it.",
    "I want a story with {} in it.",
)
ABOUT_AGAIN = (
    "Another one, please. This time about {}.",
    "Another story, please, about {}.",
    "Tell me another story about {}.",
    "Tell me another one, about {}.",
    "Can you tell me another one? About {}, please.",
    "Now tell me a story about {}.",
    "Now a story about {}.",
    "And now one about {}.",
    "And one about {}?",
    "Next, a story about {}, please.",
    "That was nice! Now one about {}.",
    "I liked that one. Do you know one about {}?",
    "One more story, please. With {} in it.",
    "Thank you! Can I hear one about {}?",
    "What about a story with {}?",
    "One more, about {}.",
)
USING = (  # {} becomes two or three nouns without articles
    "Tell me a story with the words {}.",
    "I want to hear a story with the words {}.",
    "Write a story that uses the words {}.",
    "Write a story with the words {}.",
    "Can you make a story with the words {}?",
    "Use the words {} in a story.",
)
USING_AGAIN = (
    "Another one, please. This time with the words {}.",
    "Now a story with the words {}.",
    "Again! With the words {}.",
)
ANY = (
    "Tell me a story.",
    "Can you tell me a story?",
    "Please tell me a story.",
    "I want to hear a story.",
    "A story, please.",
    "Tell me a bedtime story.",
    "Write a story.",
    "Do you know a story?",
    "It is story time!",
    "Hello! Tell me a story.",
    "Hello!",
    "Hi!",
)
ANY_AGAIN = (
    "Another one, please.",
    "Tell me another story.",
    "One more story, please!",
    "Can I hear another one?",
    "More, please.",
    "Again!",
    "That was nice. Another one?",
)
KIN = r"mom|dad|mommy|daddy|mother|father|brother|sister|grandma|grandpa|family|friends|friend"
TURNS = {1: 15, 2: 15, 3: 20, 4: 20, 5: 20, 6: 10}  # number of turns -> percentage of conversations
_PERSON_PATTERN = re.compile(r"\b(?:[Aa]n?|[Tt]he) ((?:[a-z]+ ){0,2})([a-z]+) (?:named|called) ([A-Z][a-z]+)\b")


def make_conversations(
    stories: Sequence[str], lexicon: Lexicon, seed: int, turns: int | None = None, limit: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yields conversations {"messages": [...]} in which each request is answered by a story. Uses each story once.

    turns: number of turns per conversation; None to draw 1 to 6. limit: maximum number of conversations; None to go on
    until the stories are used up.
    """
    rng = random.Random(seed)
    pool = rng.sample(list(stories), len(stories))
    made = 0
    while pool and (limit is None or made < limit):
        wanted = turns or rng.choices(list(TURNS), list(TURNS.values()))[0]
        if turns and len(pool) < turns:
            return
        used, pool = pool[:wanted], pool[wanted:]
        yield {
            "messages": [
                message for turn, story in enumerate(used) for message in _make_turn(story, turn, lexicon, rng)
            ]
        }
        made += 1


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> int:
    """Writes records as JSON lines, atomically, and returns the number of records.

    Raises `DataError` if there is no record.
    """
    count = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as partial:
        with partial.open("w", encoding="utf-8") as out:
            for record in records:
                out.write(json.dumps(record, ensure_ascii=False) + "\n")
                count += 1
        if not count:
            raise DataError(f"{path}: not one conversation, for lack of stories")
    return count


def _make_turn(story: str, turn: int, lexicon: Lexicon, rng: random.Random) -> list[dict[str, str]]:
    request = make_request(story, lexicon, rng, again=turn > 0)
    return [{"role": "user", "content": request}, {"role": "assistant", "content": story}]


def make_request(story: str, lexicon: Lexicon, rng: random.Random, again: bool = False) -> str:
    """Returns a request for a story. again: whether a story came before, so that the request may say "another one"."""
    again = again and rng.random() < 0.7
    topics = find_topics(story, lexicon, rng)
    draw = rng.random()
    if not topics or draw < 0.08:
        return _vary_typing(rng.choice(ANY_AGAIN if again else ANY), rng)
    if draw < 0.2 and len(nouns := strip_to_nouns(topics)) > 1:
        chosen = _draw_topics(nouns, rng, least=2)
        return _vary_typing(rng.choice(USING_AGAIN if again else USING).format(join_topics(chosen)), rng)
    return _vary_typing(rng.choice(ABOUT_AGAIN if again else ABOUT).format(join_topics(_draw_topics(topics, rng))), rng)


def _vary_typing(text: str, rng: random.Random) -> str:
    """Varies a request as if typed: mostly unchanged, sometimes without the full stop, sometimes also in lower case."""
    draw = rng.random()
    if draw < 0.12:
        return text.lower().rstrip(".!?")
    return text.rstrip(".") if draw < 0.22 else text


def _draw_topics(topics: Sequence[str], rng: random.Random, least: int = 1) -> list[str]:
    """Returns one to three of the best topics, in order. A person is seldom the only topic.

    topics: topics, best first. least: minimum number of topics to return.
    """
    person = any(word[0].isupper() for word in topics[0].split())
    if person and rng.random() < 0.7:
        least = 2
    count = min(len(topics), max(least, rng.choices([1, 2, 3], [45, 40, 15])[0]))
    best = topics[: count + 1]
    return [best[i] for i in sorted(rng.sample(range(len(best)), count))]


def join_topics(topics: Sequence[str]) -> str:
    """Joins topics to an English list, for example "a dog, a red ball and the park"."""
    single = [one for topic in topics for one in topic.split(" and ")]
    return " and ".join(part for part in (", ".join(single[:-1]), single[-1]) if part)


def strip_to_nouns(topics: Sequence[str]) -> list[str]:
    """Returns the nouns of topics, without articles and adjectives. Leaves out topics that are persons."""
    articles = ("a ", "an ", "the ", "some ")
    return [topic.split()[-1] for topic in topics if topic.startswith(articles) and " named " not in topic]


def find_topics(story: str, lexicon: Lexicon, rng: random.Random, most: int = 5) -> list[str]:
    """Returns the topics of a story: in six of ten cases its main person, then at most `most` nouns with articles.

    Nouns that are rare in other stories and frequent in this story come first. Every noun, adjective and name occurs in
    the story.
    """
    person = _find_person(story, lexicon)
    named = person.split() if person else []
    found = [phrase for noun, phrase in _find_nouns(story, lexicon) if noun not in named][:most]
    return [person, *found] if person and (rng.random() < 0.6 or not found) else found


def _find_person(story: str, lexicon: Lexicon) -> str | None:
    """Returns the main person of a story, for example "a little dog named Max" or "Tom and his mom".

    Returns None if the story contains no name of the lexicon.
    """
    if (match := _PERSON_PATTERN.search(story)) and match[2] in {*lexicon.nouns, "girl", "boy", "man", "woman"}:
        adjective = match[1].split()[-1:]
        kept = [word for word in adjective if word in lexicon.adjectives]
        return f"{_with_article([*kept, match[2]])} named {match[3]}" if match[3] in lexicon.names else None
    seen = [word for word in split_into_words(story) if word in lexicon.names]
    if not seen:
        return None
    name = max(dict.fromkeys(seen), key=seen.count)
    kin = re.search(rf"\b{name}(?:'s| and (?:his|her)) ({KIN})\b", story)
    pronoun = re.search(r"\b(?:and|with|to|told) (his|her) (?:" + KIN + r")\b", story)
    return f"{name} and {pronoun[1]} {kin[1]}" if kin and pronoun else name


def _find_nouns(story: str, lexicon: Lexicon) -> list[tuple[str, str]]:
    """Returns (noun, noun with article and perhaps adjective) for each noun of the story, best first."""
    tokens = [token.lower() for token in split_into_words(story)]
    phrases: dict[str, str] = {}
    score: dict[str, float] = {}
    for i, (word, following) in enumerate(zip(tokens, [*tokens[1:], "."], strict=True)):
        if word in lexicon.nouns and ends_noun(following) and i:
            early = 1.5 if i < len(tokens) / 3 else 1.0
            score[word] = score.get(word, 0.0) + min(lexicon.rarity.get(word, 1.0), 4.0) * early
            _keep_better_phrase(phrases, word, tokens[i - 1], lexicon)
    order = sorted(score, key=lambda noun: (-score[noun], noun))
    return [(noun, phrases[noun]) for noun in order if not score.keys() & set(possible_singulars(noun))]


def _keep_better_phrase(phrases: dict[str, str], noun: str, before: str, lexicon: Lexicon) -> None:
    """Sets phrases[noun] to article and noun, with `before`, the preceding word, between them if it is an adjective.

    Keeps an earlier phrase, unless only the new phrase has an adjective.
    """
    article = lexicon.nouns[noun]
    adjective = [before] if before in lexicon.adjectives else []
    if noun not in phrases or (adjective and len(phrases[noun].split()) == 2):
        phrases[noun] = _with_article([*adjective, noun]) if article == "a" else " ".join([article, *adjective, noun])


def _with_article(noun_phrase: Sequence[str]) -> str:
    phrase = " ".join(noun_phrase)
    vowel = phrase[0] in "aeiou" and not phrase.startswith(("uni", "use", "one", "eu"))
    return f"{'an' if vowel or phrase.startswith(('hour', 'honest')) else 'a'} {phrase}"
