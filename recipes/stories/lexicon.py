"""Finds nouns, adjectives and names among the stories' words from word positions, without an NLP library.

A word counts as a noun if it often follows "the" and is followed by a comma or "was"; as an adjective if it often
stands between "a" and a noun; as a name if it follows "named". Counts over some thousand stories decide.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


def _split_to_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TOKEN = re.compile(r"[A-Za-z]+(?:['’][a-z]+)*|\S|\n")
_NAMED = re.compile(r"\b(?:named|called) ([A-Z][a-z]+)\b")
_ARTICLES = {"a", "an"}
_DETERMINERS = {*_ARTICLES, "the", "his", "her", "their", "my", "your", "our", "some"}
_AFTER_NOUN = _split_to_set(
    """about after again all and are around as asked at away be became because been before began behind being but by
    called came can could couldn't did didn't do down every fell felt flew for found from got had has have he i if
    in inside into is it jumped just kept laughed like liked looked loved made named near not of off on one or out
    outside over played ran said saw she smiled so started than that then there they thought through to together
    told too tried under until up very walked wanted was wasn't we went were when where which while who will with
    would you"""
)
# Nouns, and words that the counts take for nouns, that nobody would name in a request.
_DULL_NOUNS = _split_to_set(
    """accident ache actions advice afternoon age air amount anger answer anything anyway area arm arms ashtray
    attention aunt back bad bar beak beat beauty beer best bit bite blood bodies body boo bottom boys brain
    bravery break breath brother bum bump bunch buzzing bye care cast cell center chamber chance change cheek
    cheeks chest child children choice cigarette cold color conflict conversation corner couple courage crack
    crash creation cross cry cut dad daddy damage dance dark daughter day days dead deal dear death deed
    destination difference direction distance drink ear ears east edge emergency end ending energy entrance
    equipment evening event everyone everything exam experience explained eye eyes face faces families family
    fastest father fault favor fear fears feather feelings feet fellow few fight figure finger fingers fire first
    flavor fluttering foot friend friends front frown fun fur future gear girls goal good goodbye grandma grandpa
    grandparents group growl gun guns gust guy guys hair hand handle hands happiness head heads heart heat heel
    hello help home honesty hour hours hug hugs human hunt hurry hurts husband idea ideas image imagination
    importance important inside itch jail job joy jump kid kids kind kindness kinds kiss knee knees knife knock
    land language last laugh law left leg legs less lesson license lick lie life light line lines lip lips liquid
    look loop lot lots love loved luck lung mama many massage matter meeting memories memory middle mind minute
    minutes missile mistake mom moment moments mommy moms moral more morning most mother mouth much mum muscles
    name names nap nation neck neighbors network next night no nose nothing number object okay one ones only
    operation opinion other others outside owner pain pair papa parents part parts past paw paws people piece
    pieces pile pistol pitch place places plan play please pocket port power powers price pride problem project
    promise promises question race rang razor reason replied rest result rhythm ride right row same scale score
    scratch scream season second secret sense set shade shape shock shoulder shoulders side sides sigh sight sip
    sir sister situation size skill skills skin skull smell smile smiles snap sneeze solution someone something
    son sort sound space spoonful spot square stack staff start step steps stomach stop stranger strength strip
    struggling stuff style success sudden suit surface surprise swim switch swooped symbol tail talent talk task
    taste team tear tears teeth temperature test texture thank thanks thief thing things threat throat thumb
    tightly time times tip today toe toes together tongue tooth top tried tries trip trouble trunk truth try tummy
    turn turns type uncle universe urge use victory view visit voice waist wait walk war warmth warning warnings
    way ways weapon weather week west while wife wine wing wings wisdom word words work world wound wreck wrist
    wrong yawn year yes"""
)
_NO_ADJECTIVE = _split_to_set(
    """another back best bloody certain dead different drunk dying each entire even every favorite few first inside
    last less main many more most much naked nearby next only other outside own rest right same second several
    special such third very whole"""
)


@dataclass(frozen=True)
class Lexicon:
    """The words for requests.

    nouns: noun -> article to put before the noun in a request ("a", "the" or "some"). adjectives: in lower case. names:
    capitalized. rarity: for each word in lower case, log(number of stories / number of stories with the word).
    """

    nouns: dict[str, str]
    adjectives: frozenset[str]
    names: frozenset[str]
    rarity: dict[str, float]


def split_into_words(text: str) -> list[str]:
    """Splits a text into words (including apostrophes), punctuation marks and newlines; drops spaces."""
    return _TOKEN.findall(text)


def learn_lexicon(stories: Iterable[str], rare: int = 8) -> Lexicon:
    """Returns the lexicon of stories. rare: minimum number of occurrences of a word as noun, adjective or name."""
    counts = _PositionCounts()
    for story in stories:
        counts.add(story)
    return Lexicon(
        nouns={w: counts.article(w) for w, n in sorted(counts.head.items()) if n >= rare and counts.is_noun(w)},
        adjectives=frozenset(w for w, n in counts.before_noun.items() if n >= rare and counts.is_adjective(w)),
        names=frozenset(w for w, n in counts.named.items() if n >= rare and counts.is_name(w)),
        rarity={w: math.log(counts.stories / n) for w, n in sorted(counts.within.items())},
    )


class _PositionCounts:
    """Counts how often each word occurs in each kind of position. All words except names are in lower case."""

    def __init__(self) -> None:
        self.stories = 0
        self.all: Counter[str] = Counter()  # all occurrences
        self.capital: Counter[str] = Counter()  # with a capital letter
        # after a determiner (and perhaps an adjective), as the last word of a noun phrase
        self.head: Counter[str] = Counter()
        self.with_a: Counter[str] = Counter()  # occurrences in `head` after "a" or "an"
        self.with_the: Counter[str] = Counter()  # occurrences in `head` after "the"
        self.before_noun: Counter[str] = Counter()  # between a determiner and another word
        self.a_before_noun: Counter[str] = Counter()  # occurrences in `before_noun` after "a" or "an"
        self.named: Counter[str] = Counter()  # after "named" or "called"
        self.within: Counter[str] = Counter()  # number of stories with the word

    def add(self, story: str) -> None:
        tokens = split_into_words(story)
        lower = [token.lower() for token in tokens]
        self.stories += 1
        self.all.update(lower)
        self.within.update(set(lower))
        self.capital.update(token.lower() for token in tokens if token[0].isupper())
        self.named.update(_NAMED.findall(story))
        for i, word in enumerate(lower[:-3]):
            if word in _DETERMINERS and lower[i + 1][0].isalpha():
                self._count_phrase(word, *lower[i + 1 : i + 4])

    def _count_phrase(self, determiner: str, first: str, second: str, third: str) -> None:
        """Counts a determiner and the three following words, of which the first or the second may be a noun."""
        if ends_noun(second):
            self._count_noun(determiner, first)
            return
        self.before_noun[first] += 1
        self.a_before_noun[first] += determiner in _ARTICLES
        if ends_noun(third):
            self._count_noun(determiner, second)

    def _count_noun(self, determiner: str, noun: str) -> None:
        self.head[noun] += 1
        self.with_a[noun] += determiner in _ARTICLES
        self.with_the[noun] += determiner == "the"

    def is_noun(self, word: str) -> bool:
        head, seldom_capital = self.head[word], self.capital[word] < 0.3 * self.all[word]
        mostly = head > 0.7 * (head + self.before_noun[word]) and head > 0.4 * self.all[word]
        return mostly and seldom_capital and len(word) > 2 and word.isalpha() and word not in _DULL_NOUNS | _AFTER_NOUN

    def is_adjective(self, word: str) -> bool:
        before, seldom_capital = self.before_noun[word], self.capital[word] < 0.3 * self.all[word]
        mostly = before > 0.8 * (before + self.head[word]) and self.a_before_noun[word] > 0.3 * before
        often = before > 0.1 * self.all[word]
        return mostly and often and seldom_capital and word.isalpha() and word not in _NO_ADJECTIVE

    def is_name(self, word: str) -> bool:
        return self.capital[word.lower()] > 0.9 * self.all[word.lower()] and len(word) > 2

    def article(self, noun: str) -> str:
        """Returns the article to put before a noun in a request.

        A plural gets "the" if stories nearly always use "the" before the plural, else "some". A singular gets "a" if
        stories use "a" or "an" before the noun often enough, else "the".
        """
        head, plural = self.head[noun], any(self.head[one] for one in possible_singulars(noun))
        if plural:
            return "the" if self.with_the[noun] > 0.85 * head else "some"
        return "a" if self.with_a[noun] > 0.09 * head else "the"


def possible_singulars(noun: str) -> list[str]:
    """Returns the words of which `noun` could be the plural."""
    endings = [("s", ""), ("es", ""), ("ies", "y"), ("ves", "f")]
    return [noun.removesuffix(end) + new for end, new in endings if noun.endswith(end) and not noun.endswith("ss")]


def ends_noun(token: str) -> bool:
    """Returns whether `token` ends the noun phrase before it: punctuation, or a word such as "was"."""
    return not token[0].isalpha() or token in _AFTER_NOUN
