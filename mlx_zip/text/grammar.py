"""Constrains an answer to a grammar over base ids, with the library llguidance.

Grammars are written in llguidance's dialect of Lark, from rules that this module makes: JSON that follows a schema,
text, literals and marks. A `GrammarConstraint` tracks one answer; an engine uses it as a request's `Constraint`.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.errors import GenerationError, first_message_line, import_or_explain
from mlx_zip.text.token_facts import bytes_by_id, special_ids
from mlx_zip.text.tokenizers import single_token_id

MOST_SCHEMA_BYTES = 256 * 1024
_WRITING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as chat templates write JSON
_LIMITS: dict[str, Any] = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 100_000, "max_lexer_states": 50_000}
_MORE_PROPERTIES = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
_JOINED = frozenset({"anyOf", "oneOf", "$ref"})
_FORMAT = "%json"
_lock = threading.Lock()
_vocabularies: weakref.WeakKeyDictionary[Any, GrammarVocabulary] = weakref.WeakKeyDictionary()


class GrammarVocabulary:
    """A tokenizer with the interface that llguidance needs. usable: whether an id has bytes or is special, bool [V]."""

    def __init__(self, tokenizer: Any) -> None:
        self._inner = getattr(tokenizer, "_tokenizer", tokenizer)
        ends = {*getattr(tokenizer, "eos_token_ids", ()), self._inner.eos_token_id} - {None}
        if not ends:
            raise GenerationError("a constrained answer needs a tokenizer with an eos token, which this one has not")
        self.tokens = bytes_by_id(tokenizer)
        self.special_token_ids = sorted(i for i in special_ids(self._inner) if i < len(self.tokens))
        self._special = frozenset(self.special_token_ids)
        self._ids = {token: i for i, token in enumerate(self.tokens) if token and i not in self._special}
        self._longest = max(map(len, self._ids), default=0)
        self.eos_token_id = int(min(ends))
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True  # llguidance looks for this name
        self.usable = np.array([bool(token) for token in self.tokens])
        self.usable[self.special_token_ids] = True
        llguidance = import_or_explain("llguidance", "an answer by a schema", "llguidance", extra="serve")
        self.library = llguidance.LLTokenizer(self, n_vocab=len(self.tokens), eos_token=self.eos_token_id)

    def __call__(self, text: bytes | str) -> list[int]:
        """Encodes a text for llguidance. Returns the tokenizer's ids if their bytes are exactly the text.

        Because a tokenizer may put a space before a text, the text is also encoded after a newline. If no encoding is
        exact, for example because the text contains a special token, returns the longest matching tokens.
        """
        data = text.encode() if isinstance(text, str) else bytes(text)
        for lead in ("", "\n"):
            ids = list(self._inner.encode(lead + data.decode("utf-8", "replace"), add_special_tokens=False))
            for start in range(min(len(ids), 3)):
                if self._spells_exactly(ids[start:], data):
                    return ids[start:]
        return self._longest_matches(data)

    def _spells_exactly(self, ids: list[int], data: bytes) -> bool:
        return b"".join(self.tokens[i] for i in ids) == data and self._special.isdisjoint(ids)

    def _longest_matches(self, data: bytes) -> list[int]:
        """Encodes `data` with the longest matching token at each position; stops where no token matches."""
        ids: list[int] = []
        while data:
            n = next((n for n in range(min(len(data), self._longest), 0, -1) if data[:n] in self._ids), 0)
            if n == 0:
                break
            ids.append(self._ids[data[:n]])
            data = data[n:]
        return ids


def grammar_vocabulary(tokenizer: Any) -> GrammarVocabulary:
    """Returns a tokenizer's `GrammarVocabulary`; the first call for a tokenizer takes up to a few seconds."""
    inner = getattr(tokenizer, "_tokenizer", tokenizer)
    with _lock:
        if inner not in _vocabularies:
            _vocabularies[inner] = GrammarVocabulary(tokenizer)
        return _vocabularies[inner]


class GrammarConstraint:
    """Constrains the base ids of one answer to a grammar; implements the engine's `Constraint`.

    tokenizer: our `Tokenizer` or mlx-lm's wrapper. grammar: Lark, with the rule `start`. vocab_size: length of the
    mask; None for the tokenizer's length. Raises `GenerationError`, with the reason, if llguidance refuses the grammar
    or no answer can follow the grammar, and `InstallationError` if llguidance is missing.
    """

    def __init__(self, tokenizer: Any, grammar: str, vocab_size: int | None = None) -> None:
        vocabulary = grammar_vocabulary(tokenizer)
        self._size = len(vocabulary.tokens) if vocab_size is None else vocab_size
        self._eos = frozenset(i for i in tokenizer.eos_token_ids if i < self._size)
        if not self._eos:
            raise GenerationError("a constrained answer needs an eos token, and this request has none")
        self._usable = vocabulary.usable
        self._matcher = _compile_grammar(vocabulary, grammar).deep_copy()
        self._mask: NDArray[np.bool_] | None = None
        self._ended = False

    def mask(self) -> NDArray[np.bool_]:
        """Returns which base ids may come next, bool [V]. Raises `GenerationError` if the grammar is too costly."""
        if self._mask is None:
            self._mask = self._compute_mask()
        return self._mask

    def _compute_mask(self) -> NDArray[np.bool_]:
        allowed = np.zeros(self._size, bool)
        if not self._ended:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            _raise_if_failed(self._matcher)
            n = min(self._size, len(self._usable))
            np.logical_and(np.unpackbits(bits, count=n, bitorder="little"), self._usable[:n], out=allowed[:n])
        allowed[list(self._eos)] = self.may_end
        return allowed

    @property
    def may_end(self) -> bool:
        """Whether the answer may end here."""
        return self._ended or self._matcher.is_accepting()

    def accepts(self, base_ids: Sequence[int]) -> bool:
        """Returns whether `base_ids` may come next, in this order. Ids after an eos are ignored. Does not advance."""
        before, ends = self._cut_at_eos(base_ids)
        if self._ended:
            return ends and not before
        if not all(0 <= i < len(self._usable) and i < self._size and self._usable[i] for i in before):
            return False
        if self._matcher.validate_tokens(before) < len(before):
            return False
        return not ends or self._may_end_after(before)

    def push(self, base_ids: Sequence[int]) -> None:
        """Advances by base ids that were emitted. Raises `GenerationError` if the ids are not accepted."""
        if not self.accepts(base_ids):
            raise GenerationError("the answer left its grammar")
        before, ends = self._cut_at_eos(base_ids)
        self._mask = None
        if before and not self._matcher.consume_tokens(before):
            raise GenerationError("the answer left its grammar")
        _raise_if_failed(self._matcher)
        self._ended = self._ended or ends

    def _cut_at_eos(self, base_ids: Sequence[int]) -> tuple[list[int], bool]:
        ids = [int(i) for i in base_ids]
        at = next((n for n, i in enumerate(ids) if i in self._eos), None)
        return ids[:at], at is not None

    def _may_end_after(self, base_ids: list[int]) -> bool:
        if not base_ids:
            return self.may_end
        ahead = self._matcher.deep_copy()
        return ahead.consume_tokens(base_ids) and ahead.is_accepting()


@lru_cache(maxsize=64)
def _compile_grammar(vocabulary: GrammarVocabulary, grammar: str) -> Any:
    """Returns llguidance's matcher of a grammar. Raises `GenerationError` if no answer can follow the grammar."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False, **_LIMITS)
    source = LLMatcher.grammar_from_lark(grammar)
    matcher = LLMatcher(vocabulary.library, source, log_level=0, limits=limits)
    _raise_if_failed(matcher)
    first = matcher.deep_copy()
    possible = any(first.compute_bitmask()) and not first.is_error()
    if not possible:
        raise GenerationError("the schema cannot be followed: no answer satisfies it")
    return matcher


def _raise_if_failed(matcher: Any) -> None:
    if not matcher.is_error():
        return
    reason = first_message_line(ValueError(matcher.get_error().partition(":")[2] or matcher.get_error()))
    reason = reason.removeprefix("failed to compile JSON schema:").strip()
    raise GenerationError(f"the schema cannot be followed: {reason[:300]}")


def json_rule(schema: Mapping[str, Any], lenient: bool = False) -> str:
    """Returns the grammar rule for one line of JSON that follows a schema, spaced as Python's json writes it.

    schema: {} for any object. lenient: ignore keywords that llguidance does not know, instead of raising
    `GenerationError` when the grammar is compiled; and if an object lists properties, allow no others, unless the
    schema allows them explicitly. Raises `GenerationError` if the schema is too large, too deep or not valid JSON.
    """
    options = {**_WRITING, "lenient": lenient}
    try:
        check_schema_cost(schema)
        joins = any(
            key == "allOf" for key, _ in iterate_schema_keywords(schema)
        )  # allOf: an object has the properties of several schemas, so none may be closed
        schema = _close_objects(schema) if lenient and not joins else schema
        text = json.dumps({**(schema or {"type": "object"}), "x-guidance": options}, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise GenerationError(f"the schema cannot be followed: {first_message_line(error)}") from error
    if len(text) > MOST_SCHEMA_BYTES:
        raise GenerationError(f"the schema is too large: {len(text)} bytes, and at most {MOST_SCHEMA_BYTES} are taken")
    return f"{_FORMAT} {text}"


def _close_objects(schema: Any) -> Any:
    """Returns a schema in which objects that list properties allow no other properties, unless explicitly allowed.

    An object with `properties` and also anyOf, oneOf or $ref stays as it is, because the latter may name properties.
    """
    if not isinstance(schema, Mapping):
        return schema
    if "properties" in schema and schema.keys() & _JOINED:
        return schema
    inner = {key: _close_nested_objects(key, value) for key, value in schema.items()}
    if schema.get("properties") and not schema.keys() & _MORE_PROPERTIES:
        inner["additionalProperties"] = False
    return inner


def _close_nested_objects(key: str, value: Any) -> Any:
    """Returns the value of a schema's keyword, with `_close_objects` applied to the schemas in it."""
    if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping):
        return {name: _close_objects(one) for name, one in value.items()}
    if key in ("anyOf", "oneOf", "prefixItems") and isinstance(value, list):
        return [_close_objects(one) for one in value]
    return _close_objects(value) if key in ("items", "additionalProperties") else value


def literal_rule(text: str) -> str:
    """Returns the grammar rule for exactly the text `text`."""
    return json.dumps(text, ensure_ascii=False)


def mark_rule(tokenizer: Any, text: str) -> str:
    """Returns the grammar rule for the mark `text`: a token if the mark is a single token, else literal text."""
    token = single_token_id(tokenizer, text)
    return literal_rule(text) if token is None else f"<[{token}]>"


def rules_until_mark(tokenizer: Any, name: str, text: str) -> str:
    """Returns grammar rules for any text up to and including the mark `text`. name: name of the first rule."""
    token = single_token_id(tokenizer, text)
    if token in grammar_vocabulary(tokenizer).special_token_ids:
        return f"{name}: {name.upper()}_TEXT <[{token}]>\n{terminal_without_mark(name.upper() + '_TEXT', text)}"
    return f"{name}[suffix={literal_rule(text)}]: /(.|\\n)*/"


def terminal_without_mark(name: str, text: str) -> str:
    """Returns the grammar terminal called `name` for any text that does not contain the mark `text`."""
    spelled = "".join(c if c.isalnum() else f"\\x{ord(c):02x}" if ord(c) < 256 else c for c in text)
    return f"{name}: /(.|\\n)*/ & ~/(.|\\n)*{spelled}(.|\\n)*/"


# ---- refusing schemas whose patterns would take llguidance seconds per step

MOST_REPEATED = 20_000  # maximum characters of a pattern with its counted repetitions written out
MOST_MULTIPLE = 10_000
_ITEMS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL)


def check_schema_cost(schema: Any) -> None:
    """Raises `GenerationError` if a pattern repeats too much or a `multipleOf` is too large."""
    for key, value in iterate_schema_keywords(schema):
        patterns = [value] if key == "pattern" else list(value) if key == "patternProperties" else []
        if any(isinstance(pattern, str) and _expanded_pattern_length(pattern) > MOST_REPEATED for pattern in patterns):
            raise GenerationError(f"the schema cannot be followed: a {key} repeats too much")
        if key == "multipleOf" and isinstance(value, int | float) and abs(value) > MOST_MULTIPLE:
            raise GenerationError(f"the schema cannot be followed: multipleOf is above {MOST_MULTIPLE}")


def iterate_schema_keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yields all keys and values in a schema, at any depth."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            yield from value.items()
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value


def _expanded_pattern_length(pattern: str) -> int:
    """Returns the approximate length of a regular expression with counted repetitions written out."""
    sums, last = [0], 0  # lengths of the open groups, and of the last item, which a repetition would repeat
    for item in _ITEMS.finditer(pattern):
        if item[1]:
            times = max(int(item[1][:9]), int((item[2] or "0")[:9]))
            sums[-1] += last * (times - 1) if times else 0
            last *= max(times, 1)
        elif item[0] == "(":
            sums.append(0)
        elif item[0] == ")" and len(sums) > 1:
            last = sums.pop()
            sums[-1] += last
        else:
            last = 1
            sums[-1] += 1
    return sum(sums)
