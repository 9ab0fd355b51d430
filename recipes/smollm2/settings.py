"""Defines all settings of the recipe: packages, sizes, requests, packs, training.

`FULL` made the shipped adapter. `SMALL` is for tests.
"""

from __future__ import annotations

from dataclasses import dataclass

PYPI, NPM = "PyPI", "npm"


@dataclass(frozen=True)
class Package:
    """A package of source files. version: exact version to read. held_out: whether it is used only for measuring."""

    registry: str
    name: str
    version: str
    held_out: bool = False

    def __str__(self) -> str:
        return f"{self.registry} {self.name} {self.version}"


def _packages(registry: str, names: str, held_out: bool = False) -> tuple[Package, ...]:
    return tuple(Package(registry, *one.split("=="), held_out=held_out) for one in names.split())


PACKAGES = (
    *_packages(
        PYPI,
        """aiosmtplib==5.1.3 anyio==4.16.0 attrs==26.1.0 boltons==26.2.0 celery==5.7.0 click==8.5.1 django==5.2.19
        einops==0.8.2 fastapi==0.165.0 flask==3.1.3 httpx==0.28.1 jinja2==3.1.6 keras==3.15.1 marshmallow==4.4.0
        mkdocs==1.6.1 more-itertools==11.2.1 networkx==3.6.1 nltk==3.10.4 pygments==2.21.0 pyparsing==3.3.3
        pytest==9.2.0 redis==8.1.0 requests==2.34.2 rich==15.0.0 scrapy==2.19.0 starlette==1.10.0 sympy==1.14.0
        textual==8.2.8 toolz==1.2.0 trio==0.35.0 typer==0.29.2 urllib3==2.8.0 werkzeug==3.1.9""",
    ),
    *_packages(
        PYPI,
        """cachetools==8.0.1 humanize==4.17.0 itsdangerous==2.2.0 jsonschema==4.26.0 markdown==3.11.3 parso==0.8.7
        tabulate==0.10.0""",
        held_out=True,
    ),
    *_packages(
        NPM,
        """axios==1.21.1 commander==14.0.3 eslint==10.15.0 express==5.3.0 fastify==5.12.8 handlebars==4.7.10
        jsdom==29.1.1 knex==3.3.0 mocha==12.0.3 moment==2.31.0 mongoose==9.12.1 three==0.187.0 underscore==1.13.8
        webpack==5.112.2 winston==3.19.0 ws==8.23.0""",
    ),
    *_packages(NPM, "chalk==5.6.2 koa==3.3.0 luxon==3.7.2", held_out=True),
)


@dataclass(frozen=True)
class TextSizes:
    """The packages to read, and maximum numbers of bytes to take.

    package: from one package. library: from Python's standard library. held_out_package: from one held-out package.
    held_out: for each file of held-out texts.
    """

    packages: tuple[Package, ...] = PACKAGES
    package: int = 500_000
    library: int = 4_000_000
    held_out_package: int = 40_000
    held_out: int = 400_000


@dataclass(frozen=True)
class TalkSettings:
    """How conversations are sampled; sizes in base ids.

    rows, card_rows: number of conversations at a time, on a CPU and on an NVIDIA GPU. question, answer: maximum ids of
    a turn that the model writes as user and as assistant. total: maximum ids of a conversation. top_p: total
    probability of the ids to draw from. temperatures: temperatures from which one is drawn per conversation. alone:
    share of conversations whose first user turn the model writes. second: share of conversations with a second user
    turn. repeated: maximum share of repeated 4-grams in a kept turn. train, held_out: total ids of conversations to
    keep. exact: whether to sample in float32 even if bfloat16 is faster.
    """

    rows: int = 40
    card_rows: int = 2048
    question: int = 128
    answer: int = 384
    total: int = 768
    top_p: float = 0.95
    temperatures: tuple[float, ...] = (0.7, 0.8, 0.9, 1.0)
    alone: float = 0.35
    second: float = 0.35
    repeated: float = 0.5
    train: int = 5_400_000
    held_out: int = 60_000
    exact: bool = False


@dataclass(frozen=True)
class PackSettings:
    """How packs are learned. size: maximum entries of each pack. most_ids: maximum base ids to learn a pack from.

    merge_size: merge size of the model. growth: number of entries that a codebook may add to the pack's entries in
    training. shipped_growth: the same for the adapter to ship, which is measured. window: number of base ids that are
    compressed separately. domains: domains that get a pack each. mixed: domains of the mixed pack, which the model is
    trained with, and their shares.
    """

    size: int = 1024
    most_ids: int = 2_500_000
    merge_size: int = 4
    growth: int = 32
    shipped_growth: int = 8
    window: int = 1024
    domains: tuple[str, ...] = ("chat", "code", "math")
    mixed: tuple[tuple[str, float], ...] = (("chat", 0.4), ("code", 0.4), ("math", 0.12), ("medical", 0.08))

    @property
    def codebook_size(self) -> int:
        """Maximum number of entries of a codebook."""
        return self.size + self.growth


@dataclass(frozen=True)
class Leg:
    """One leg of the training.

    mixture: domains and their shares. start: share of each domain's documents to move from the front to the end.
    samples: maximum number of windows. context: maximum base ids per window. repeated: whether to read a domain's
    documents again if they are too few for its share; else the data end when a domain ends. plain: number of further
    windows that both models read without hypertokens. encoder: flags of `mlx_zip train` for only the model with
    hypertokens. Other fields: flags for both models.
    """

    mixture: tuple[tuple[str, float], ...] = (
        *(("code", 0.4), ("chat", 0.27), ("chat_cut", 0.13), ("math", 0.1), ("medical", 0.06)),
        *(("docs", 0.015), ("tasks", 0.025)),
    )
    start: float = 0.0
    repeated: bool = True
    samples: int = 20_000
    plain: int = 3_300
    context: int = 1024
    iters: int = 606
    batch_size: int = 24
    warmup: int = 60
    seed: int = 1
    learning_rate: float = 1.2e-3
    min_learning_rate: float = 2e-5
    lora_rank: int = 32
    lora_scale: float = 2.0
    save_every: int = 100
    valid_share: float = 0.0
    encoder: tuple[str | int | float, ...] = (
        *("--encoder", "res_latent_attn", "--encoder-size", 128, "--encoder-layers", 1, "--encoder-heads", 4),
        *("--residual-by-side", "--canonical", "--encoder-learning-rate", 5e-4),
        *("--pack-rows", "--pack-learning-rate", 2e-3, "--position-mode", "base_token_end"),
    )


@dataclass(frozen=True)
class MeasureSettings:
    """What to measure. domains: held-out domains. bytes: maximum bytes per domain. context: base ids per window.

    answers: number of free answers. answer: maximum base ids per answer. labels: maximum examples per data set for
    classification. label_text: maximum base ids of an example's text.
    """

    domains: tuple[str, ...] = ("chat", "code", "math", "web")
    bytes: int = 24_000
    context: int = 1024
    answers: int = 40
    answer: int = 128
    labels: int = 200
    label_text: int = 160


@dataclass(frozen=True)
class FrontierSettings:
    """Settings of the comparison with shallower models. layers: numbers of layers of the shallow models.

    packs: packs to use with the model with hypertokens. domains: domains of held-out texts. sizes: base tokens to read
    and to write for timing steps, as in `mlx_zip bench generate --sizes`.
    """

    layers: tuple[int, ...] = (24, 16)
    packs: tuple[str, ...] = ("chat", "code", "math")
    domains: tuple[str, ...] = ("chat", "code")
    sizes: str = "512+128"


@dataclass(frozen=True)
class Settings:
    """All settings of the recipe. legs: settings of each leg, in order; further legs use the last leg's settings."""

    texts: TextSizes = TextSizes()
    talk: TalkSettings = TalkSettings()
    packs: PackSettings = PackSettings()
    legs: tuple[Leg, ...] = (Leg(), Leg(iters=500, learning_rate=8e-4, seed=2))
    measure: MeasureSettings = MeasureSettings()
    frontier: FrontierSettings = FrontierSettings()


FULL = Settings()
SMALL = Settings(
    TextSizes(packages=(), library=60_000, held_out=20_000),
    TalkSettings(
        rows=4, question=120, answer=150, total=500, alone=0.9, repeated=0.9, train=600, held_out=200, exact=True
    ),
    PackSettings(
        size=16,
        most_ids=8000,
        growth=16,
        shipped_growth=12,
        domains=("chat", "code"),
        mixed=(("chat", 0.5), ("code", 0.5)),
    ),
    legs=(
        Leg(
            mixture=(("chat", 0.5), ("code", 0.5)),
            repeated=False,
            samples=12,
            plain=2,
            context=96,
            iters=3,
            batch_size=2,
            warmup=1,
            lora_rank=2,
            save_every=2,
            encoder=(
                *("--encoder", "res_latent_attn", "--encoder-size", 8, "--encoder-layers", 1, "--encoder-heads", 2),
                *("--residual-by-side", "--canonical", "--encoder-learning-rate", 5e-4, "--pack-rows"),
            ),
        ),
    ),
    measure=MeasureSettings(domains=("chat", "code"), bytes=2000, context=96, answers=2, answer=8),
    frontier=FrontierSettings(layers=(1,), packs=("chat",), domains=("code",), sizes="24+8"),
)

GENERAL_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # the chat template's own
SYSTEM_MESSAGES = {
    "general": GENERAL_SYSTEM,
    "coding": "You are a helpful programming assistant. You answer with short, working code and explain it.",
    "maths": "You are a patient mathematics tutor. You solve problems step by step.",
    "writing": "You are a writing assistant. You help people to write stories, letters and articles.",
    "science": "You are a science teacher. You explain how things work, with examples.",
    "summary": "You summarise and rewrite the texts that the user gives you.",
    "planning": "You help people to plan: trips, meals, projects and learning. You answer with clear lists.",
}
FUNCTION_REQUESTS = (
    "Explain what this function does:\n\n{}",
    "Explain the following code line by line.\n\n{}",
    "Write a docstring for this function, and give the complete function back:\n\n{}",
    "Add comments to this code:\n\n```python\n{}\n```",
    "Rewrite this function so that its names are clearer:\n\n```python\n{}\n```",
    "Add type hints to this Python code and return the whole code:\n\n```python\n{}\n```",
    "Is there a bug in this function? Give a corrected version.\n\n{}",
    "Write three tests for this function:\n\n```python\n{}\n```",
    "Make this function shorter:\n\n{}",
    "{}\n\nHow is this function called? Give two examples.",
)
TEXT_REQUESTS = (
    "Summarise the following text in three sentences.\n\n{}",
    "Summarise this text as a list of bullet points:\n\n{}",
    "Rewrite the following text in plain English.\n\n{}",
    "What are the most important facts in this text?\n\n{}",
    "{}\n\nWrite five questions about this text, each with its answer.",
    "Give the following text a title and explain why you chose it.\n\n{}",
    "Correct the grammar and style of this text and give it back:\n\n{}",
    "Continue this text:\n\n{}",
    "Read this text and answer in one paragraph: what was found, and how?\n\n{}",
    "Rewrite this text as a conversation between two people:\n\n{}",
)
PROBLEM_REQUESTS = ("{}", "{}", "Solve this problem step by step.\n\n{}", "{}\n\nExplain how you got the answer.")
TASK_REQUESTS = ("{}", "{} Use Python.", "{} Show an example of its use.")
