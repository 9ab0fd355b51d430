"""A chat: its conversation, its requests to the engine, the answers as they arrive, and reports on them."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from mlx_zip.cli.chat.conversation import Conversation, HypertokenUse
from mlx_zip.cli.chat.front import Front
from mlx_zip.engine import Counted, Counts, Emitted, Engine, Event, Failed, Finished, Progress, Started, Submission
from mlx_zip.errors import GenerationError
from mlx_zip.packs.chosen import check_pack_fits_slots, read_packs
from mlx_zip.progress import pluralize
from mlx_zip.text.prompts import check_system_message
from mlx_zip.text.stream import TextStream
from mlx_zip.text.tokenizers import REPLACEMENT

Arrived = queue.SimpleQueue[Event | None]  # None: stop the answer
OWN, NONE = "own", "none"  # words that /pack takes in place of files
_FULL = "cut off: the conversation fills the model's context; /reset begins a new one"
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True)
class Settings:
    """Settings of a chat's answers. max_tokens: maximum base tokens of an answer. sampling: fields of `Sampling`.

    seed: seed of the first answer's random numbers, 1 higher for each further answer; None for random seeds.
    template_options: further arguments of the chat template.
    """

    max_tokens: int = 256
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = 0
    template_options: Mapping[str, Any] = field(default_factory=dict)


class Program:
    """A chat with an engine's model. front: reads messages and shows answers. conversation: the one to continue.

    pack: pack that codebooks begin with, None for that which the model was loaded with. pack_names: files of the pack.
    Attribute `ended`: whether the chat is over.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        front: Front,
        conversation: Conversation,
        pack: Any = None,
        pack_names: Sequence[str] = (),
    ) -> None:
        self.engine, self.settings, self.front, self.conversation = engine, settings, front, conversation
        self.pack, self.pack_names = pack, pack_names
        self._has_own_pack = pack is None  # whether the model was loaded with its own pack
        self.totals, self.ended = _Totals(), False
        self._asked = 0  # number of answers asked for so far

    def ask(self, question: str, temp: float | None = None) -> None:
        """Sends a question to the model, shows the answer, and adds both to the conversation.

        A stopped answer is added too; if the answer is empty, nothing is added. temp: sampling temperature, None for
        that of the settings. Raises `MlxZipError`.
        """
        arrived = Arrived()
        self.conversation.set_question(question)
        with self.front.show_answer(lambda: arrived.put(None)) as view:
            submission = self._make_submission(question, temp)
            parts = (
                split_reasoning(view, self.engine.tokenizer, submission.base_ids)
                if self.front.is_interactive
                else nullcontext(view.feed)
            )
            with parts as show:
                answer = stream_answer(self.engine, submission, arrived, show, view.show_prefill)
        self.totals.add_answer(answer.counts)
        if answer.text:
            self.conversation.add_answer(answer.text, answer.uses)
        self._show_how_answer_ended(answer)

    def retry(self, temp: float | None) -> None:
        """Asks the last message again and replaces the answer, unless the new answer fails or is empty."""
        before = self.conversation
        assert before.asked is not None
        self.conversation = before.without_last_answer()
        try:
            self.ask(before.asked, temp)
        finally:
            if not self.conversation.answered:
                self.conversation = before

    def check_system_prompt(self, system: str | None) -> None:
        """Raises `GenerationError` if the model's chat template cannot render the system message `system`."""
        if system is not None:
            check_system_message(self.engine.tokenizer, system, self.settings.template_options)

    def choose_pack(self, names: Sequence[str]) -> None:
        """Sets the packs that codebooks begin with from the next answer on.

        names: pack files, or [OWN] for the model's own pack, or [NONE]. Raises `MlxZipError` if the packs do not fit.
        """
        if not self.engine.info.codebook_size:
            raise GenerationError("/pack: this model has no hypertokens, so nothing could use a pack")
        if list(names) == [OWN]:
            if not self._has_own_pack:
                raise GenerationError("/pack own: the model was loaded without its own pack, because of --pack")
            self.pack, self.pack_names = None, ()
            return
        if list(names) == [NONE]:
            from mlx_zip.packs.pack import Pack

            self.pack, self.pack_names = Pack(()), [NONE]
            return
        chosen = read_packs(list(names))
        assert chosen is not None
        chosen.check_made_for(self.engine.tokenizer)
        check_pack_fits_slots(chosen, self.engine.info.codebook_size)
        self.pack, self.pack_names = chosen, list(chosen.by_name)

    def describe_start_pack(self) -> str:
        """Returns a line that says which entries codebooks begin with."""
        if not self.engine.info.codebook_size:
            return "this model has no hypertokens"
        if self.pack is None:
            files = f" with {', '.join(self.pack_names)}" if self.pack_names else ""
            return f"codebooks begin as the model's own{files}"
        if not len(self.pack):
            return "codebooks begin empty"
        return f"codebooks begin with {len(self.pack):,} entries of {', '.join(self.pack_names)}"

    def _make_submission(self, question: str, temp: float | None) -> Submission:
        """Returns the request for an answer. temp: temperature, None for the settings'. Raises `GenerationError`."""
        settings = self.settings
        seed = None if settings.seed is None else (settings.seed + self._asked) % 2**64
        self._asked += 1
        changed = {} if temp is None else {"temp": temp}
        return Submission(
            base_ids=self.conversation.prompt_ids(self.engine, question, settings.template_options),
            max_tokens=settings.max_tokens,
            eos_ids=frozenset(self.engine.tokenizer.eos_token_ids),
            sampling={**settings.sampling, "seed": seed, **changed},
            pack=self.pack,
            show=self.engine.info.codebook_size > 0,
        )

    def _show_how_answer_ended(self, answer: Answer) -> None:
        if not answer.text:
            self.front.show_line(
                f"{'stopped' if answer.reason == 'cancelled' else 'no answer'}; the message is taken back"
            )
        elif answer.reason == "cancelled":
            self.front.show_line("stopped; the answer so far is kept")
        elif answer.reason == "length":
            full = answer.counts.base_tokens < (most := self.settings.max_tokens)
            self.front.show_line(_FULL if full else f"cut off after {most:,} base tokens (--max-tokens)")
        if answer.text and self.engine.info.codebook_size:
            self.front.show_note(self.totals.last_answer_line())


# ---- an answer


class Answer:
    """An answer. show: called with each piece of text and the number of base tokens of its last id.

    Attributes: `text`; `base_ids` without the eos; `uses` of hypertokens, empty unless the request set `show`. When the
    answer has ended, also `counts` and `reason`: "stop" if the model ended it, "length" at a limit, "cancelled" by the
    user.
    """

    def __init__(self, tokenizer: Any, show: Callable[[str, int], None]) -> None:
        self._stream, self._show = TextStream(tokenizer), show
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._ended = False  # whether the text has ended
        self.text, self.reason, self.counts = "", "", Counts()
        self.base_ids: list[int] = []
        self.uses: list[HypertokenUse] = []

    def add_emitted(self, event: Emitted) -> None:
        """Shows the text that an emitted id completes; does nothing if the text has already ended."""
        if self._ended:
            return
        piece = self._stream.feed(event.base_ids)
        self._ended = piece.finish_reason is not None
        self.base_ids += [one for one in piece.base_ids if one not in self._eos]
        if event.origin is not None:
            self.uses.append(HypertokenUse(event.base_ids, event.origin.kind))
        self._show_text(piece.text, len(event.base_ids))

    def end_text(self) -> None:
        """Shows the text that was held back; ids that arrive later are ignored."""
        if not self._ended:
            self._ended = True
            self._show_text(self._stream.finish("stop").text, 1)

    def _show_text(self, text: str, length: int) -> None:
        if text:
            self.text += text
            self._show(text, length)


def stream_answer(
    engine: Engine,
    submission: Submission,
    arrived: Arrived,
    show: Callable[[str, int], None],
    show_prefill: Callable[[int, int], None],
) -> Answer:
    """Submits a request, shows its text as it arrives, and returns the answer when it has ended.

    arrived: queue that the engine's events are put into. A None in the queue stops the answer, which keeps the text
    shown so far; a signal handler may put None there, even before this call. show: see `Answer`. show_prefill:
    called with the number of prompt ids read so far and the number of all prompt ids. The engine stores the answer's
    base ids under its text, for later prompts that hold it. Raises what `Engine.submit` raises, and the error of a
    failed request.
    """
    answer = Answer(engine.tokenizer, show)
    ticket = engine.submit(submission, arrived.put)
    try:
        while True:
            event = arrived.get()
            if event is None:
                answer.end_text()  # ignores the ids that arrive from now on
                engine.cancel(ticket)
            elif isinstance(event, Emitted):
                answer.add_emitted(event)
            elif isinstance(event, Progress):
                show_prefill(event.read, event.total)
            elif isinstance(event, Failed):
                raise event.error
            elif isinstance(event, Finished):
                answer.end_text()
                answer.reason, answer.counts = event.reason, event.counts
                if answer.text and not answer.text.endswith(REPLACEMENT):
                    engine.note_answer(ticket, answer.text, answer.base_ids)
                return answer
            else:
                assert isinstance(event, Started | Counted)
    finally:
        engine.cancel(ticket)


@contextmanager
def split_reasoning(view: Any, tokenizer: Any, prompt_ids: Sequence[int]) -> Iterator[Callable[[str, int], None]]:
    """Context manager: yields a function that takes each piece of an answer and the number of base tokens of its id.

    view: see `Front.show_answer`; shows the answer's text and reasoning, without the marks around the reasoning.
    prompt_ids: base ids of the prompt, at whose end the mark that starts reasoning may stand.
    """
    turns = import_module("mlx_zip.server.answers.turn")
    splitter = import_module("mlx_zip.server.answers.splitter").Splitter(tokenizer, turns.Turn(), prompt_ids)

    def show(deltas: Sequence[Any], length: int) -> None:
        for delta in deltas:
            if isinstance(delta, turns.Reasoning):
                view.feed_reasoning(delta.text)
            else:
                view.feed(delta.text, length)

    try:
        yield lambda text, length: show(splitter.feed(text), length)
    finally:
        show(splitter.finish(), 1)


# ---- figures


@dataclass
class _Totals:
    """Sums over the answers of a chat. last: counts of the last answer."""

    answers: int = 0
    base_tokens: int = 0
    steps: int = 0
    last: Counts = field(default_factory=Counts)

    def add_answer(self, counts: Counts) -> None:
        self.answers += 1
        self.base_tokens += counts.base_tokens
        self.steps += counts.steps
        self.last = counts

    def last_answer_line(self) -> str:
        """Returns the last answer's figures in one line that fits into a terminal."""
        last = self.last
        rate = f" ({last.base_tokens / last.steps:.2f} per step)" if last.steps else ""
        cached = f", {last.cached_tokens:,} of {last.prompt_tokens:,} cached" * bool(last.cached_tokens)
        return f"{pluralize(last.base_tokens, 'base token')}, {pluralize(last.steps, 'step')}{rate}{cached}"

    def summary_lines(self) -> Iterator[str]:
        """Yields all figures, one line each: the last answer, all answers, prompt, codebook, KV cache."""
        if not self.answers:
            yield "no answer yet"
            return
        last = self.last
        yield f"last answer: {_steps_in_words(last.base_tokens, last.steps)}"
        if (seconds := last.total_s - last.first_id_s) > 0 and last.steps > 1:
            steps_per_s = (last.steps - 1) / seconds  # `seconds` begins when the first id is emitted
            tokens_per_s = steps_per_s * last.base_tokens / last.steps
            yield f"its speed: {tokens_per_s:,.0f} base tokens/s, {steps_per_s:,.0f} steps/s"
        yield f"{pluralize(self.answers, 'answer')}: {_steps_in_words(self.base_tokens, self.steps)}"
        yield f"last prompt: {pluralize(last.prompt_tokens, 'base token')}, {last.cached_tokens:,} of them cached"
        if last.codebook_size:
            yield f"codebook: {last.entries:,} of {pluralize(last.codebook_size, 'entry')}"
            saved = last.kv_bytes_saved
            sizes = (f"{saved / unit:.1f} {name}" for unit, name in _UNITS if saved >= unit)
            yield f"KV cache: {next(sizes, pluralize(saved, 'byte'))} saved"


def _steps_in_words(base_tokens: int, steps: int) -> str:
    """Returns a text with base tokens, steps, base tokens per step, and steps saved."""
    rate = f" ({base_tokens / steps:.2f} per step)" if steps else ""
    saved = f", {pluralize(base_tokens - steps, 'step')} saved" if base_tokens > steps else ""
    return f"{pluralize(base_tokens, 'base token')} in {pluralize(steps, 'step')}{rate}{saved}"
