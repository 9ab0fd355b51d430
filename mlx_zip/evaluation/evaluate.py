"""`evaluate`: measures several models in the same way, one after the other, and returns a record of all figures.

All inputs are read and checked before the first model is loaded: packs, texts, prompts, tokenizers and task names.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip.codec import Codebook, compress_next
from mlx_zip.config import ZipConfig
from mlx_zip.engine.mlx.scoring import context_limit, scores_itself
from mlx_zip.engine.sampling.options import Sampling
from mlx_zip.errors import DataError, GenerationError, ModelError, errors_as, failure_reason
from mlx_zip.evaluation import tasks as benchmark
from mlx_zip.evaluation.bits import (
    BitsResult,
    Windows,
    check_context_fits,
    compare_bits,
    cut_scored_windows,
    measure_bits,
)
from mlx_zip.evaluation.evaluation_report import make_evaluation_record
from mlx_zip.evaluation.rates import RateSettings, check_batch_size, measure_rates
from mlx_zip.layout import MODEL_TYPE, has_hypertokens
from mlx_zip.models.loading import load
from mlx_zip.models.model_folder import (
    ModelArgs,
    check_codebook_size,
    codebook_config_changes,
    find_model_folder,
    is_plain_model,
    read_model_config,
)
from mlx_zip.models.rows.fingerprints import compute_model_fingerprint
from mlx_zip.models.rows.row_store import RowStore
from mlx_zip.packs import chosen as chosen_packs
from mlx_zip.packs.pack import Pack
from mlx_zip.progress import ProgressBar, pluralize
from mlx_zip.text.conversations import Conversation, Prompt, document_openings, make_conversations, read_prompts
from mlx_zip.text.documents import Corpus, read_corpus
from mlx_zip.text.stream import StopMatcher
from mlx_zip.text.tokenizers import load_tokenizer

LARGEST_DEFAULT_CONTEXT = 1024
_NOT_RECORDED = {  # settings that the record holds elsewhere, or that change no figure
    "data",
    "canonical",
    "trust_remote_code",
    "confirm_run_unsafe_code",
}
_TASK_SETTINGS = {  # settings that only benchmark tasks use
    "include_path",
    "num_shots",
    "limit",
    "border",
    "apply_chat_template",
    "confirm_run_unsafe_code",
}


@dataclass(frozen=True)
class EvaluationOptions:
    """What to measure for each model. Raises `DataError` if settings contradict each other.

    data: text files or data sets to score in bits per byte. separator, limit_bytes: see `read_corpus`. context: maximum
    number of base ids per window and per task request; None for the first model's number of positions, limited to 1024
    for windows. fill_windows: see `cut_scored_windows`. availability: see `score_rows`. generate: number of
    conversations to generate, None for none. prompts: file of prompts for the conversations; None to use the first
    `opening` base ids of each document as prompts. turns: requests per conversation. keep_cache, max_tokens, temp,
    top_p, stop: see `rates.RateSettings`. tasks, include_path, num_shots, limit, apply_chat_template,
    confirm_run_unsafe_code: see `run_tasks`. border: see `lm_eval_model`. batch_size: windows, conversations or
    requests per model call. canonical: whether to decode canonically, None for the setting in each model's config.
    """

    data: Sequence[str] = ()
    separator: str | None = None
    limit_bytes: int | None = None
    context: int | None = None
    fill_windows: bool = False
    availability: str = "causal"
    generate: int | None = None
    prompts: str | None = None
    opening: int = 8
    turns: int = 1
    keep_cache: bool = False
    max_tokens: int = 256
    temp: float = 0.0
    top_p: float = 1.0
    stop: Sequence[str] = ()
    tasks: Sequence[str] = ()
    include_path: str | None = None
    num_shots: int | None = None
    limit: int | None = None
    border: str = "whole"
    apply_chat_template: bool = False
    confirm_run_unsafe_code: bool = False
    batch_size: int = 8
    seed: int = 0
    canonical: bool | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not (self.data or self.generate is not None or self.tasks):
            raise DataError("nothing to evaluate: give text (--data), a number of stories (--generate) or --tasks")
        if self.generate is not None and not self.data and self.prompts is None:
            raise DataError("--generate needs --prompts, or --data whose openings are continued")
        if self.prompts is not None and self.generate is None:
            raise DataError("--prompts needs --generate N")
        self._check_tasks()
        check_batch_size(self.batch_size)
        if self.max_tokens < 1 and self.max_tokens != -1:
            raise DataError(f"max_tokens (--max-tokens) must be at least 1, or -1 for no limit, got {self.max_tokens}")
        Sampling(temp=self.temp, top_p=self.top_p, seed=self.seed)  # raises for values out of range
        StopMatcher(self.stop)  # raises for an empty string

    def _check_tasks(self) -> None:
        """Raises `DataError` if no tasks are named but a setting for tasks differs from its default."""
        given = [f for f in fields(self) if f.name in _TASK_SETTINGS and getattr(self, f.name) != f.default]
        if given and not self.tasks:
            flags = ", ".join(f"--{one.name.replace('_', '-')}" for one in given)
            raise DataError(f"{flags}: of benchmark tasks only; name them with --tasks")

    def record(self) -> dict[str, Any]:
        """Returns the settings by name, without those in `_NOT_RECORDED`."""
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_RECORDED}
        return kept | {"stop": list(self.stop), "tasks": list(self.tasks)}


@dataclass(frozen=True)
class ModelRunner:
    """An engine that runs models. name: value of --engine. device: description of the engine's device.

    load: function with the arguments of `mlx_zip.load` that returns a model and its tokenizer.
    """

    name: str
    device: str
    load: Callable[..., tuple[Any, Any]]


def evaluate(
    models: Sequence[str],
    options: EvaluationOptions,
    *,
    pack: Any = None,
    codebook_size: int | None = None,
    row_store: RowStore | None = None,
    progress: bool = False,
    runner: ModelRunner | None = None,
) -> dict[str, Any]:
    """Returns the record of all figures (see `make_evaluation_record`); the first model is the baseline of the others.

    models: folders, hub ids or bundled names. options: what to measure. pack: one pack or several to merge, each a path
    or a `Pack`, whose entries every codebook begins with; None for each model's own. codebook_size: maximum number of
    hypertokens, None for each model's own. row_store: see `load`. progress: show on stderr what will be measured, and
    how far it is. runner: None for MLX.

    Raises `MlxZipError` if an input cannot be read or inputs do not fit together, mostly before any model is loaded.
    """
    check_codebook_size(codebook_size)
    chosen = chosen_packs.read_packs(pack)
    runner = ModelRunner("mlx", mx.default_device().type.name, load) if runner is None else runner
    evaluation = _Evaluation(models, options, chosen, codebook_size, row_store, progress, runner)
    if progress:
        print(evaluation.describe(), file=sys.stderr)
    records = []
    for name in models:
        records.append(evaluation.measure_model(name))
        gc.collect()  # frees the model's memory before the next model is loaded
    settings = {**options.record(), "context": evaluation.context}
    settings |= {"codebook_size": codebook_size, "engine": runner.name}
    settings |= {"pack": None if chosen is None else list(chosen.by_name)}
    settings |= {"codebook_fingerprint": None if chosen is None else chosen.fingerprint}
    data = None
    if evaluation.corpus is not None and evaluation.windows is not None:
        data = {**evaluation.corpus.record(), "altered_documents": evaluation.windows.altered}
    return make_evaluation_record(records, settings, data)


class _Evaluation:
    """Everything that is read and checked before a model is loaded: also every model's config and tokenizer.

    folders: each model's folder, by the name that the user gave. context: maximum base ids per window. task_context:
    maximum base ids per task request, None until known. manager: the harness's `TaskManager`, None without tasks.
    request_pack: the given pack without its tokenizer's fingerprint, which is checked already. baseline: figures of the
    first model, None until measured.
    """

    def __init__(
        self,
        models: Sequence[str],
        options: EvaluationOptions,
        pack: Pack | None,
        codebook_size: int | None,
        row_store: RowStore | None,
        progress: bool,
        runner: ModelRunner,
    ) -> None:
        self.models, self.options, self.pack, self.codebook_size = models, options, pack, codebook_size
        self.row_store, self.progress, self.runner = row_store, progress, runner
        self.request_pack = None if pack is None else replace(pack, tokenizer=None)
        self.corpus = read_corpus(options.data, options.separator, options.limit_bytes) if options.data else None
        prompts = None if options.prompts is None else read_prompts(options.prompts)
        self.manager = benchmark.check_tasks(
            options.tasks, options.include_path, options.num_shots, options.limit, options.seed
        )
        self.folders = {name: find_model_folder(name) for name in models}
        default = _default_context_length(read_model_config(self.folders[models[0]]))
        self.context, self.task_context = default if options.context is None else options.context, options.context
        self.windows: Windows | None = None
        self.conversations: Sequence[Sequence[Prompt]] = []
        self.baseline: BitsResult | None = None
        for number, name in enumerate(models):
            folder = self.folders[name]
            tokenizer = load_tokenizer(folder, options.trust_remote_code)
            if pack is not None:
                pack.check_made_for(tokenizer)
            _check_model_files(folder, codebook_size, pack)
            if self.corpus is not None:
                self._cut_and_check_windows(self.corpus, tokenizer, name, models[0])
            if number == 0 and options.generate is not None:
                if prompts is None and self.corpus is not None:
                    prompts = document_openings(tokenizer, self.corpus.documents, options.opening)
                self.conversations = make_conversations(
                    prompts or [], options.generate, options.turns, repeat=options.temp > 0
                )
            check_prompts_fit(folder, tokenizer, self.conversations, codebook_size, pack)

    def _cut_and_check_windows(self, corpus: Corpus, tokenizer: Any, name: str, first: str) -> None:
        """Cuts the text into windows with a model's tokenizer, and keeps the first model's windows.

        name: the model's name. first: the first model's name. Raises `DataError` if the windows of the two differ.
        """
        windows = cut_scored_windows(tokenizer, corpus.documents, self.context, self.options.fill_windows)
        if self.windows is None:
            self.windows = windows
        elif not windows.same_as(self.windows):
            raise DataError(
                f"{name} has another tokenizer than {first}, so their windows are not the same text; "
                "evaluate each model separately: bits per byte of whole documents can still be compared"
            )
        positions = read_model_config(self.folders[name]).get("max_position_embeddings")
        check_context_fits("windows", windows.longest, positions if isinstance(positions, int) else None)

    def describe(self) -> str:
        """Returns a line of text that says what will be measured."""
        options, models = self.options, self.models
        parts = [f"models: {', '.join(models)}" + (" (the first is the baseline)" if len(models) > 1 else "")]
        if self.corpus is not None and self.windows is not None:
            parts.append(
                f"text: {pluralize(self.corpus.n_bytes, 'byte')} in "
                f"{pluralize(len(self.corpus.documents), 'document')}, "
                f"{pluralize(len(self.windows.windows), 'window')} of at most {self.context:,} base ids"
            )
        if options.generate is not None:
            parts.append(
                f"generation: {pluralize(options.generate, 'conversation')} of {pluralize(options.turns, 'turn')}, at "
                f"most {options.max_tokens:,} base tokens per turn"
            )
        if options.tasks:
            parts.append(f"tasks: {', '.join(options.tasks)}")
        parts.append(f"engine: {self.runner.name}; device: {self.runner.device}")
        return "; ".join(parts)

    def measure_model(self, name: str) -> dict[str, Any]:
        """Loads a model and returns all its figures. The message of a `ModelError` begins with the model's name."""
        model, tokenizer = self._load_model(self.folders[name])
        if self.pack is not None and has_hypertokens(model):
            chosen_packs.check_pack_fits(self.pack, model, tokenizer)
        if self.task_context is None:
            self.task_context = context_limit(model) or LARGEST_DEFAULT_CONTEXT
        record: dict[str, Any] = {"model": name, "kind": "plain"}
        if has_hypertokens(model):
            record["kind"] = "plain with a pack" if model.is_plain else "zip2zip"
            record |= {"canonical": model.config.canonical, **chosen_packs.pack_record(self.pack, model)}
        with errors_as(ModelError, name, ModelError):  # says which of several models has failed
            if self.windows is not None:
                record["text"] = self._measure_bits(name, model, self.windows)
            if self.options.generate is not None:
                record["generation"] = self._measure_rates(name, model, tokenizer)
            if self.options.tasks:
                record["tasks"] = self._run_tasks(model, tokenizer)
        if scores_itself(model):
            model.close()
        return record

    def _load_model(self, folder: Path) -> tuple[Any, Any]:
        """Loads a model and its tokenizer. A plain model gets the pack only if the pack's rows were tuned for it."""
        loading = {
            "trust_remote_code": self.options.trust_remote_code,
            "canonical": self.options.canonical,
            "row_store": self.row_store,
        }
        plain = is_plain_model(str(folder))
        chosen = chosen_packs.pack_load_options(self.pack, self.codebook_size, plain)
        if not plain:
            return self.runner.load(folder, **loading, **chosen)
        loaded = self.runner.load(folder, **loading)
        rows = None if chosen["pack"] is None else chosen["pack"].rows
        if rows is None or rows.plain is None:
            return loaded
        own = loaded[0].fingerprint if scores_itself(loaded[0]) else compute_model_fingerprint(loaded[0])
        return self.runner.load(folder, **loading, **chosen) if rows.model == own else loaded

    def _measure_bits(self, name: str, model: Any, windows: Windows) -> dict[str, Any]:
        """Returns a model's bits per byte; for all but the first model with differences from the first."""
        options = self.options
        with ProgressBar(len(windows.windows), "window", name, shown=self.progress) as step:
            bits = measure_bits(model, windows, options.batch_size, options.availability, self.request_pack, step)
        if self.baseline is None:
            self.baseline = bits
            return bits.record()
        return bits.record() | compare_bits(bits, self.baseline)

    def _measure_rates(self, name: str, model: Any, tokenizer: Any) -> dict[str, Any]:
        names = ("max_tokens", "temp", "top_p", "seed", "batch_size", "keep_cache")
        given = {option: getattr(self.options, option) for option in names}
        settings = RateSettings(**given, stop=tuple(self.options.stop), pack=self.request_pack)
        with ProgressBar(len(self.conversations) * self.options.turns, "turn", name, shown=self.progress) as step:
            return measure_rates(model, tokenizer, self.conversations, settings, step).record()

    def _run_tasks(self, model: Any, tokenizer: Any) -> dict[str, Any]:
        names = ("include_path", "num_shots", "limit", "apply_chat_template", "seed", "confirm_run_unsafe_code")
        given = {name: getattr(self.options, name) for name in (*names, "batch_size", "border")}
        given |= {"manager": self.manager, "pack": self.request_pack, "context": self.task_context}
        return benchmark.run_tasks(model, tokenizer, self.options.tasks, **given)


# ---- checks before a model is loaded, so that hours of measuring do not end in an error


def _default_context_length(config: Mapping[str, Any]) -> int:
    inner = config.get("text_config")
    nested = inner.get("max_position_embeddings") if isinstance(inner, Mapping) else None
    positions = config.get("max_position_embeddings", nested)
    fits = isinstance(positions, int) and positions > 0
    return min(LARGEST_DEFAULT_CONTEXT, positions) if fits else LARGEST_DEFAULT_CONTEXT


def _check_model_files(folder: Path, codebook_size: int | None, pack: Pack | None) -> None:
    """Raises `ModelError`, `ConfigError` or `GenerationError` if a model's config or weights cannot be read.

    codebook_size, pack: the user's choices, None for the model's own; they must fit a zip2zip model's config.
    """
    section = _read_zip_config(folder, codebook_size)
    if section is not None and pack is not None:
        chosen_packs.check_pack_fits_codec(pack, section)
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no weights (model*.safetensors)")
    for file in files:
        try:
            mx.load(str(file))  # reads the header only
        except (OSError, RuntimeError, ValueError) as error:
            raise ModelError(f"{file} cannot be read: {failure_reason(error)}") from error


def _read_zip_config(folder: Path, codebook_size: int | None) -> ZipConfig | None:
    """Returns the config of a zip2zip model, with `codebook_size` if that is not None; returns None for a plain model.

    Raises `ModelError` or `ConfigError` if the config cannot be read.
    """
    config = read_model_config(folder)
    if config["model_type"] != MODEL_TYPE:
        return None
    changed = {**config, **codebook_config_changes(config, codebook_size, None)}
    return ModelArgs.from_dict(changed).zip_config


def check_prompts_fit(
    folder: Path,
    tokenizer: Any,
    conversations: Sequence[Sequence[Prompt]],
    codebook_size: int | None,
    pack: Pack | None,
) -> None:
    """Raises `GenerationError` if the model cannot answer the first prompt of a conversation.

    The chat template must render the prompt, and the prompt must leave room in the model's context. Later turns are not
    checked, because their length depends on the answers. codebook_size, pack: None for the model's own.
    """
    context = read_model_config(folder).get("max_position_embeddings")
    for number, prompts in enumerate(conversations, start=1):
        try:
            base_ids = Conversation(tokenizer, prompts).next_prompt()
        except GenerationError as error:
            raise GenerationError(f"prompt {number}: {error}") from error
        if isinstance(context, int) and len(base_ids) >= context:
            used = _count_positions(folder, base_ids, codebook_size, pack)
            if used >= context:
                raise GenerationError(
                    f"prompt {number} takes {used} positions, {folder.name}'s context has {context} and generation "
                    "needs at least one: shorten it (--opening, or the text in --prompts)"
                )


def _count_positions(folder: Path, base_ids: Sequence[int], codebook_size: int | None, pack: Pack | None) -> int:
    """Returns the number of positions that a prompt takes in a new request; a lower bound for a plain model."""
    section = _read_zip_config(folder, codebook_size)
    if section is None:
        longest = 1 if pack is None else max(map(len, pack), default=1)
        return -(-len(base_ids) // longest)
    if section.by_base:
        return len(base_ids)
    return len(compress_next(Codebook(section.codec_params.with_start(pack)), np.array(base_ids, np.uint32)))
