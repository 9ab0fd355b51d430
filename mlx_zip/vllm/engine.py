"""`VllmEngine`: an engine (`mlx_zip.engine.interface.Engine`) whose model and scheduler are vLLM's.

This process compresses prompts and checks requests before vLLM sees them, because a worker cannot refuse a request. It
keeps the ids of ended requests, so that a chat continues with the same ids. The keys and values of these ids stay in
vLLM's prefix cache as long as the cache has room.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, cast

from pydantic import ValidationError
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.exceptions import VLLMError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.cuda.network.checkpoint import folder_fingerprint
from mlx_zip.device import peak_rss_bytes
from mlx_zip.engine.interface import Deliver, SessionInfo, Submission
from mlx_zip.engine.options import RunOptions, ServeOptions
from mlx_zip.engine.parts import Served
from mlx_zip.engine.request import Chosen, Request
from mlx_zip.engine.sampling.options import Sampling
from mlx_zip.engine.scheduler import Scheduler
from mlx_zip.engine.scored import Compressed, Scored
from mlx_zip.engine.sessions.session import Ids, Session, ids_in_book
from mlx_zip.engine.sessions.store import SessionOptions, SessionStore
from mlx_zip.engine.submissions import ModelFacts
from mlx_zip.engine.threaded import ThreadedEngine
from mlx_zip.errors import ConfigError, EngineError, GenerationError, first_message_line
from mlx_zip.layout import MODEL_TYPE
from mlx_zip.models.decoder_options import has_tied_head
from mlx_zip.models.model_folder import find_model_folder, load_model_tokenizer, read_eos_ids, read_model_config
from mlx_zip.named import resolve_model_name
from mlx_zip.packs.pack import Pack, resolve_pack
from mlx_zip.text.tokenizers import Tokenizer
from mlx_zip.vllm.config import Zip2ZipConfig, config_of_export, register
from mlx_zip.vllm.packs import HYPERTOKENS, TELL_BROKEN, pack_arguments
from mlx_zip.vocab.first_stage import tokenizer_fingerprint

MOST_LOGPROBS = 20  # maximum number of likeliest ids per step, as in OpenAI's API
MAX_RUNNING = 256  # requests at a time, vLLM's own default
_SESSIONS_BYTES = 256 << 20  # maximum size of the kept ids
RETRY_S = 0.05  # wait until vLLM is asked again to empty its prefix cache


class VllmEngine(ThreadedEngine):
    """An engine on vLLM. load: calls `load_on_vllm`. Other arguments: see `ThreadedEngine`."""

    _llm: LLMEngine | None = None  # None until it is loaded
    _purge_due = False  # whether vLLM's prefix cache is to be emptied once no request uses it

    def _make_served(self, load: Callable[[], VllmServed], name: str) -> VllmServed:
        served = load()
        self.tokenizer, self._llm, self._broken_id = served.tokenizer, served.llm, served.broken_id
        _raise_when_core_dies(served.llm.engine_core)
        return served

    def _make_scheduler(self, served: VllmServed, max_kv_bytes: int | None) -> Scheduler:
        return VllmScheduler(served, self._store, self._forget_ended, partial(self._make_reading, served))

    def _make_reading(self, served: VllmServed, request: Request) -> Running:
        return served.submit(request)

    def _score_in_parts(self, served: Any, row: Compressed, top: int) -> Iterator[Scored]:
        raise GenerationError("vLLM does not tell how likely the ids of a prompt are; --engine mlx and torch do")

    def check(self, submission: Submission) -> None:
        """Raises `GenerationError` if the submission cannot be served."""
        self._make_request(submission, lambda event: None)

    def _make_request(self, submission: Submission, deliver: Deliver) -> Request:
        request = super()._make_request(submission, deliver)
        _raise_if_unsupported(request)
        with _refusals():
            sampling_params(request, self._broken_id, submission.max_tokens)
        return request

    def purge_sessions(self) -> int:
        """See `Engine`. Also empties vLLM's prefix cache, as soon as no request uses it."""
        count = super().purge_sessions()
        self._purge_due = True
        self._inbox.ask(self._free_when_idle)
        return count

    def _free_when_idle(self) -> float | None:
        """Empties vLLM's prefix cache if due. Returns seconds until a retry if a request uses the cache, else None."""
        if self._purge_due and self._llm is not None:
            self._purge_due = not self._llm.reset_prefix_cache()
        return RETRY_S if self._purge_due else None

    def save_session(self, name: str, file: Path) -> None:
        raise EngineError("vLLM has the keys and values of sessions; they cannot be written to a file")

    def load_session(self, file: Path) -> SessionInfo:
        raise EngineError(f"{file}: vLLM cannot go on from the keys and values in a file")

    def _memory_figures(self) -> dict[str, int]:
        return {"memory_bytes": 0, "peak_memory_bytes": peak_rss_bytes()}

    def _free_thread_resources(self) -> None:
        if self._llm is not None:
            self._llm.engine_core.shutdown()


def open_vllm_engine(
    model_name: str | Path,
    *,
    dtype: str | None = None,
    pack: Any = None,
    canonical: bool | None = None,
    codebook_size: int | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    max_running: int = MAX_RUNNING,
    max_waiting: int = 4 * MAX_RUNNING,
    max_prompt_tokens: int | None = None,
    keep_sessions: bool = True,
    vllm_args: Mapping[str, Any] | None = None,
) -> VllmEngine:
    """Loads a model on vLLM and returns an engine that serves it.

    model_name: a folder, converted or exported, a bundled model's name or a hub id. dtype: "float32", "float16" or
    "bfloat16", None for vLLM's default. pack: the pack of requests that name none; None for the model's own. canonical,
    codebook_size: None for the values in config.json. tokenizer_config: may hold `chat_template` only. vllm_args:
    further arguments of vLLM's `EngineArgs`, for example {"tensor_parallel_size": 2}. Raises `ConfigError`,
    `ModelError` or `DataError` if model, pack or an option is invalid, and what vLLM raises.
    """
    load = partial(
        load_on_vllm,
        str(model_name),
        {
            "trust_remote_code": trust_remote_code,
            "max_num_seqs": max_running,
            **({} if dtype is None else {"dtype": dtype}),
            **(vllm_args or {}),
        },
        pack,
        {"canonical": canonical, "codebook_size": codebook_size},
        (tokenizer_config or {}).get("chat_template"),
    )
    options = ServeOptions(max_running, max_waiting, max_prompt_tokens)
    make_store = partial(make_id_store, options=SessionOptions(max_bytes=_SESSIONS_BYTES)) if keep_sessions else None
    return VllmEngine(load, str(model_name), options, make_store)


# ---- the model


def load_on_vllm(
    model_name: str, args: Mapping[str, Any], pack: Any, changes: Mapping[str, Any], chat_template: str | None
) -> VllmServed:
    """Loads a model on vLLM. Other arguments and errors: see `open_vllm_engine`.

    args: arguments of vLLM's `EngineArgs`; must include `trust_remote_code`, which also applies to the tokenizer.
    changes: new values for fields of `ZipConfig`; None keeps a field.
    """
    register()
    export = config_of_export(resolve_model_name(model_name))
    folder = resolve_model_name(model_name) if export is not None else find_model_folder(model_name)
    keys = read_model_config(folder) if export is None else export
    hyper = export is not None or keys["model_type"] == MODEL_TYPE
    options: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "max_logprobs": MOST_LOGPROBS,
        "disable_log_stats": True,
        **args,
    }
    made = None
    if hyper:
        made = _with_changes(Zip2ZipConfig(**keys), changes)
        options["hf_overrides"] = partial(_replaced_by, made)
    elif pack is not None or any(value is not None for value in changes.values()):
        raise ConfigError(f"{model_name} has no hypertokens: pack, codebook size and canonical decoding are not for it")
    elif keys.get("quantization"):
        raise ConfigError(
            f"vLLM cannot read the packed weights of {folder}; unpack them: python -m mlx_lm convert -d --hf-path "
            f"{folder} --mlx-path FOLDER"
        )
    with _wrong_arguments():
        vllm_args = EngineArgs(**options)
    tokenizer = load_model_tokenizer(folder, read_eos_ids(folder, keys), args["trust_remote_code"], chat_template)
    tied = has_tied_head(keys) if made is None else made.decoder_config().tie_word_embeddings
    start = None if pack is None else resolve_pack(pack)
    fingerprint = folder_fingerprint(folder, tied)
    with _wrong_arguments():
        llm = LLMEngine.from_engine_args(vllm_args)
    try:
        return VllmServed(llm, tokenizer, made, start, tied, fingerprint)
    except BaseException:
        llm.engine_core.shutdown()
        raise


@contextmanager
def _wrong_arguments() -> Iterator[None]:
    """Context manager: raises `ConfigError` if vLLM refuses its arguments in the block."""
    try:
        yield
    except TypeError as error:
        raise ConfigError(f"vLLM's arguments: {error}") from error
    except ValidationError as error:
        wrong = error.errors()[0]
        parts = [*map(str, wrong["loc"]), wrong["msg"].partition("\n")[0]]
        raise ConfigError(f"vLLM's arguments: {': '.join(parts)}") from error


def _with_changes(config: Zip2ZipConfig, changes: Mapping[str, Any]) -> Zip2ZipConfig:
    """Returns `config` with new values for fields of `ZipConfig`; None keeps a field. Raises `ConfigError`."""
    chosen = {name: value for name, value in changes.items() if value is not None}
    section = {**config.section, **replace(config.zip_config, **chosen).to_dict()} if chosen else config.section
    return Zip2ZipConfig(section=section, decoder_keys=config.decoder_keys, packing=config.packing,
                         encoder_file=config.encoder_file)  # fmt: skip


def _replaced_by(made: Zip2ZipConfig, _found: Any) -> Zip2ZipConfig:
    return made


class VllmServed(Served):
    """A model that vLLM has loaded. In this process, a request has a codebook only.

    made: the model's config, None for a plain model. pack: the pack of requests that name none, None for the model's
    own. tied: whether the head is the embedding. fingerprint: of the weights. broken_id: see `Zip2ZipConfig`, None for
    a plain model.
    """

    def __init__(
        self,
        llm: LLMEngine,
        tokenizer: Tokenizer,
        made: Zip2ZipConfig | None,
        pack: Pack | None,
        tied: bool,
        fingerprint: str,
    ) -> None:
        self.llm, self.tokenizer, self.pack, self.options = llm, tokenizer, pack, RunOptions()
        config, self.broken_id = (None, None) if made is None else (made.zip_config, made.broken_id)
        model = llm.vllm_config.model_config
        self.hyper, self.canonical = config is not None, config is not None and config.canonical
        self.by_base = config is not None and config.by_base
        self.vocab_size = model.hf_config.vocab_size if config is None else config.vocab_size
        ids = model.max_model_len
        self.context = min(ids, model.hf_config.max_position_embeddings) if self.by_base else ids
        values = 2 * model.hf_config.num_hidden_layers * model.get_total_num_kv_heads() * model.get_head_size()
        self.kv_bytes_per_id = values * model.dtype.itemsize
        # without hypertokens the codec has no slots, and a codebook only logs base ids
        self.params = CodecParams(self.vocab_size, 0, 1) if config is None else config.codec_params
        if pack is not None:
            pack.check_made_for(tokenizer)
            self.params = self.params.with_start(pack)
        self._facts = ModelFacts(
            vocab_size=self.vocab_size,
            width=model.hf_config.vocab_size - self.hyper,  # without `broken_id`, the last id
            context=self.context,
            by_base=self.by_base,
            params=self.params if self.hyper else None,
            model=fingerprint,
            tokenizer=tokenizer_fingerprint(tokenizer),
            kv_bytes_per_id=self.kv_bytes_per_id,
            sides_are_one=config is not None and config.encoder.tie_encoders and tied,
            row_width=model.hf_config.hidden_size,
        )
        if pack is not None:
            self._facts.check_tuned_rows(pack)
        self._names = itertools.count()

    def make_facts(self) -> ModelFacts:
        return self._facts

    def new_cache(self, start: Any) -> IdLog:
        """Returns the cache of a new request, which begins with the pack `start`, None for the model's own pack."""
        return IdLog(self.params.with_start(start))

    def state_of(self, cache: IdLog) -> IdLog:
        """Returns `cache`, which holds the codebook."""
        return cache

    def make_request_sampler(self, options: Sampling, state: Any) -> NoDraws:
        """Returns a placeholder for a sampler: vLLM chooses the ids."""
        return NoDraws(options.temp == 0)

    def make_penalties(self, options: Sampling, state: Any) -> list[Any]:
        """Returns an empty list: requests with penalties are refused."""
        return []

    def submit(self, request: Request) -> Running:
        """Submits a request to vLLM. Raises `GenerationError` if vLLM refuses the request."""
        book, name = request.book, str(next(self._names))
        prompt: dict[str, Any] = {"prompt_token_ids": [*book.ids.tolist(), *request.prompt_ids.tolist()]}
        if request.checked.pack_key:
            prompt["cache_salt"] = request.checked.pack_key
        most = -1 if request.max_steps == math.inf else int(request.max_steps)
        with _refusals():
            self.llm.add_request(name, prompt, sampling_params(request, self.broken_id, most, self.pack))
        book.push(request.prompt_ids)
        return Running(request, name)


@dataclass(frozen=True)
class NoDraws:
    """A placeholder for a request's sampler: vLLM chooses the ids. greedy: whether the best id is always chosen."""

    greedy: bool
    state: None = None


class IdLog:
    """A request's cache in this process: a codebook that logs the ids that vLLM has read."""

    def __init__(self, params: CodecParams) -> None:
        self.book = Codebook(params)
        self.books = [self.book]


class IdCaches:
    """A `SessionCaches` that keeps only the ids of ended requests. Has no methods for files."""

    own_pack_key = ""

    def __init__(self, served: VllmServed) -> None:
        self._served = served
        self.merge_size = served.params.merge_size

    def held_ids(self, cache: IdLog, base_ids: Sequence[int] | None) -> tuple[Ids, Ids]:
        return ids_in_book(cache.book)

    def prepare_to_keep(self, cache: IdLog) -> Ids:
        return cache.book.ids

    def measure(self, kept: Ids) -> tuple[int, bool]:
        return kept.nbytes, True

    def count_fitting_ids(self, ids: int) -> int:
        return ids

    def cache_for_request(self, session: Session, ids: int, move: bool, start: Any) -> IdLog:
        log = self._served.new_cache(start)
        log.book.push(session.cache[:ids])
        return log


def make_id_store(served: VllmServed, options: SessionOptions) -> SessionStore:
    """Returns a new store of the ids of ended requests."""
    return SessionStore(cast(Any, IdCaches(served)), options)  # sessions have no files here


# ---- requests


@dataclass
class Running:
    """A request that vLLM runs. name: its request id in vLLM. done: whether vLLM has ended it."""

    request: Request
    name: str
    done: bool = False


class VllmScheduler(Scheduler):
    """Gives requests to vLLM as they arrive, and delivers their events; vLLM decides which requests run when."""

    def __init__(
        self, served: VllmServed, store: Any, ended: Callable[[Request], None], submit: Callable[[Request], Any]
    ) -> None:
        super().__init__(served, store, sys.maxsize, None, ended, submit)
        self.readings: deque[Any] = deque()  # of `Running`
        self._llm, self._broken_id = served.llm, served.broken_id

    def run_round(self) -> None:
        """Gives waiting requests to vLLM, aborts cancelled ones, and has vLLM take a step."""
        self._end_cancelled_waiting()
        self._admit_waiting()
        for running in list(self.readings):
            if running.request.cancelled or running.request.error is not None:
                self._end_running(running)
        if self._llm.has_unfinished_requests():
            running_by_name = {running.name: running for running in self.readings}
            for output in self._llm.step():
                if output.request_id in running_by_name:
                    self._take_output(running_by_name[output.request_id], output)
        for running in [] if self._llm.has_unfinished_requests() else list(self.readings):
            running.request.error = EngineError("vLLM has lost the request")
            self._end_running(running)

    def _take_output(self, running: Running, output: Any) -> None:
        """Takes the ids that vLLM has chosen for a request, in their order, and ends the request after its last id."""
        request, made, running.done = running.request, output.outputs[0], output.finished
        if not request.steps:
            ids = output.num_cached_tokens or 0  # found in vLLM's prefix cache
            request.cached_tokens = int(request.book.logged_base_ids(0, ids)[1].sum())
        for at, chosen in enumerate(made.token_ids):
            found = made.logprobs[at] if made.logprobs else {}
            self._fail_if_it_raises([request], partial(self._take_id, request, _chosen(request, chosen, found)))
            if request.ended or request.reason is not None:
                break
        if request.error is None and request.reason is None and output.finished:
            request.reason = "length" if made.finish_reason == "length" else None
            if request.reason is None:
                request.error = EngineError(f"vLLM has ended the request: {made.finish_reason}")
        if request.error is not None or request.reason is not None:
            self._end_running(running)

    def _take_id(self, request: Request, chosen: Chosen) -> None:
        if chosen.id == self._broken_id:
            raise EngineError("a worker of vLLM could not read the request's ids or its pack; vLLM's log says why")
        request.count_chosen(chosen)
        if request.reason is None:
            request.book.push(chosen.id)
        request.send_emitted()

    def _end_running(self, running: Running) -> None:
        if not running.done:
            self._llm.abort_request([running.name])
        self.readings.remove(running)
        self._end_request(running.request)


def sampling_params(request: Request, broken_id: int | None, most: int, own_pack: Pack | None = None) -> SamplingParams:
    """Returns a request's options as `SamplingParams` of vLLM.

    broken_id: see `Zip2ZipConfig`, None for a plain model. most: maximum ids of the answer, -1 for the context's limit.
    own_pack: the pack of requests that name none, None for the model's own. Raises `GenerationError` if the pack cannot
    be sent to workers, and what vLLM raises.
    """
    submission, options = request.submission, request.checked.sampling
    pack = own_pack if request.checked.start is None else request.checked.start
    ours = {} if broken_id is None else {HYPERTOKENS: True, TELL_BROKEN: True, **pack_arguments(pack)}
    return SamplingParams(
        temperature=options.temp,
        top_p=options.top_p or 1.0,
        top_k=options.top_k,
        min_p=options.min_p,
        seed=None if options.seed is None else options.seed % (1 << 63),
        max_tokens=None if most == -1 else most,
        logprobs=submission.top_logprobs,
        stop_token_ids=sorted(submission.eos_ids) + ([] if broken_id is None else [broken_id]),
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=ours or None,
    )


@contextmanager
def _refusals() -> Iterator[None]:
    """Context manager: raises `GenerationError` if vLLM refuses a request in the block."""
    try:
        yield
    except (ValueError, VLLMError) as error:
        raise GenerationError(f"vLLM refuses the request: {first_message_line(error)}") from error


def _raise_when_core_dies(core: Any) -> None:
    """Makes vLLM's next `step` raise if vLLM's core process has died; without this `step` would wait forever."""
    reader = getattr(core, "output_queue_thread", None)
    if reader is None:  # the core is in this process
        return

    def tell() -> None:
        reader.join()
        core.outputs_queue.put_nowait(EngineDeadError())

    Thread(target=tell, name="vLLM's end", daemon=True).start()


def _chosen(request: Request, one: int, found: Mapping[int, Any]) -> Chosen:
    """Returns an id with log-probabilities. found: vLLM's, by id, of the likeliest ids and the chosen id, or empty."""
    if not found:
        return Chosen(one)
    top = request.submission.top_logprobs or 0
    likely = sorted(((value.rank, key, value.logprob) for key, value in found.items() if value.rank <= top))
    return Chosen(one, found[one].logprob, [(key, logprob) for _, key, logprob in likely])


def _raise_if_unsupported(request: Request) -> None:
    """Raises `GenerationError` if an option is one that vLLM lacks or treats differently from this project."""
    options, submission = request.checked.sampling, request.submission
    wrong = {
        "a grammar or JSON schema": submission.constraint is not None,
        "penalties and logit_bias": options.repetition_penalty not in (None, 1.0)
        or bool(options.presence_penalty or options.frequency_penalty or options.logit_bias),
        "XTC": options.xtc_probability > 0,
        "min_tokens_to_keep above 1": options.min_tokens_to_keep > 1,
        f"more than {MOST_LOGPROBS} top_logprobs": (submission.top_logprobs or 0) > MOST_LOGPROBS,
    }
    if found := [what for what, asked in wrong.items() if asked]:
        raise GenerationError(f"--engine vllm does not take {found[0]}; --engine mlx and torch do")
