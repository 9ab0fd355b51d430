"""The classifier of MultiTok's experiment: one transformer layer over an embedding trained from scratch.

As in the paper (arXiv 2410.21548, section IV): width 100, two heads, feed-forward width 200, Adam. It differs from the
published code in two points: it reads the mean over all positions that are not padding, instead of the last position,
which is mostly padding; and it leaves out no text. A batch holds texts of similar length and is padded to its longest,
so shorter sequences take less time. Embedding rows that occur in no training text have no gradient and keep their
random values, so they are left out of training, which saves time and does not change the result. A training step is not
compiled, because on a CPU it takes three times longer when compiled.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from numpy.typing import NDArray

from mlx_zip.models.rows.fingerprints import named_arrays
from mlx_zip.vocab.multitok import Samples

from .labelled import EncodedTexts

WIDTH, HEADS, HIDDEN, RATE = 100, 2, 200, 0.01
EPSILONS = (0.1, 0.01)
STAYS = 10  # number of epochs for which the loss must stay below eps
POOL = 10  # number of batches whose texts are sorted by length together
Integers = NDArray[np.integer]


class Classifier(nn.Module):
    """Classifies texts: ids [B, L] int32, 0 for padding -> logits [B, C]. Source: arXiv 2410.21548, section IV.

    trained: number of ids in training texts; these ids are 1 to `trained`. used: number of all ids, padding included;
    rows from 1 + trained on keep random values and are used only in evaluation. length: most ids in a text.
    """

    def __init__(self, trained: int, used: int, classes: int, length: int) -> None:
        super().__init__()
        drawn = nn.Embedding(used, WIDTH).weight
        self.table, self._fixed = drawn[: 1 + trained], drawn[1 + trained :]
        self.place = nn.Embedding(length, WIDTH)
        self.attention, self.norm_1 = nn.MultiHeadAttention(WIDTH, HEADS), nn.LayerNorm(WIDTH)
        self.up, self.down, self.norm_2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, classes)

    def __call__(self, ids: mx.array) -> mx.array:
        """Returns logits [B, C] for ids [B, L] int32; id 0 is padding."""
        real = (ids > 0).astype(mx.float32)  # [B, L]
        table = self.table if self.training else mx.concatenate([self.table, self._fixed])
        x = table[ids] + self.place(mx.arange(ids.shape[1]))
        mask = mx.where(real > 0, 0.0, -1e9)[:, None, None, :]
        x = self.norm_1(x + self.attention(x, x, x, mask))
        x = self.norm_2(x + self.down(nn.relu(self.up(x))))
        mean = (x * real[..., None]).sum(axis=1) / mx.maximum(real.sum(axis=1, keepdims=True), 1)
        return self.head(mean)


def train_classifier(
    encoded: EncodedTexts, answers: Sequence[Integers], classes: int, seed: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Trains one classifier and returns its fields of the record, with the test accuracy after each epoch.

    answers: class numbers of the training texts and of the test texts. Seconds include training only.
    """
    mx.random.seed(seed)
    order = np.random.default_rng(seed)
    sizes = [token_counts(part) for part in (encoded.train, encoded.test)]
    model = Classifier(encoded.trained, encoded.used, classes, max(1, *(int(part.max()) for part in sizes)))
    optimizer = optim.Adam(learning_rate=args.learning_rate)
    gradient = nn.value_and_grad(model, classifier_loss)
    losses, walls, processors, scores = [], [], [], []
    for _ in range(args.epochs):
        total, begun = 0.0, (time.perf_counter(), time.process_time())
        for which in batches_of_similar_length(sizes[0], args.batch_size, order):
            loss, gradients = gradient(model, mx.array(pad_samples(encoded.train, which)), mx.array(answers[0][which]))
            optimizer.update(model, gradients)
            mx.eval(model.state, optimizer.state, loss)
            total += float(loss) * len(which)
        walls.append(time.perf_counter() - begun[0])
        processors.append(time.process_time() - begun[1])
        losses.append(total / len(answers[0]))
        scores.append(accuracy_and_auc(model, encoded.test, answers[1], args.batch_size))
    body = sum(array.size for name, array in named_arrays(model.parameters()) if name != "table")
    return {
        "accuracy": scores[-1][0],
        "auc": scores[-1][1],
        "rows": encoded.rows,
        "rows_trained": encoded.trained,
        "parameters": encoded.rows * WIDTH + body,
        "tokens": [int(part.sum()) for part in sizes],
        "longest": [int(part.max()) for part in sizes],
        "loss": [round(loss, 5) for loss in losses],
        "accuracies": [s[0] for s in scores],
        "aucs": [s[1] for s in scores],
        "seconds": [round(s, 3) for s in walls],
        "processor_s": [round(s, 3) for s in processors],
        **times_to_converge(losses, walls, processors),
    }


def times_to_converge(losses: Sequence[float], walls: Sequence[float], processors: Sequence[float]) -> dict[str, Any]:
    """Returns C(eps) for each of `EPSILONS`, in epochs, wall seconds and processor seconds; None if not reached.

    losses, walls, processors: training loss, wall seconds and processor seconds of each epoch.
    """
    epochs = {str(eps): epochs_to_converge(losses, eps) for eps in EPSILONS}
    until = lambda times: {eps: None if n is None else round(sum(times[:n]), 2) for eps, n in epochs.items()}
    return {"epochs_to": epochs, "seconds_to": until(walls), "processor_s_to": until(processors)}


def epochs_to_converge(losses: Sequence[float], epsilon: float) -> int | None:
    """Returns C(eps): the number of epochs after which the loss stays below `epsilon` for `STAYS` epochs or to the end.

    None if the loss never stays below `epsilon`.
    """
    return next((i for i in range(len(losses)) if max(losses[i : i + STAYS]) < epsilon), None)


def classifier_loss(model: Classifier, ids: mx.array, labels: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(ids), labels, reduction="mean")


# ---- batches


def token_counts(samples: Samples) -> NDArray[np.int64]:
    return np.diff(samples.ends.astype(np.int64), prepend=0)


def batches_of_similar_length(
    sizes: NDArray[np.int64], size: int, order: np.random.Generator | None = None
) -> Iterator[Integers]:
    """Yields batches of at most `size` sample numbers, of similar length; each sample is in one batch.

    sizes: length of each sample. order: shuffles the samples, sorts every `POOL` batches of them by length, and yields
    the batches in random order; None: all samples are sorted by length.
    """
    n = len(sizes)
    drawn = np.arange(n) if order is None else order.permutation(n)
    pool = n if order is None else POOL * size
    cut = []
    for start in range(0, n, pool):
        some = drawn[start : start + pool]
        some = some[np.argsort(sizes[some], kind="stable")]
        cut += [some[at : at + size] for at in range(0, len(some), size)]
    return (cut[i] for i in (range(len(cut)) if order is None else order.permutation(len(cut))))


def pad_samples(samples: Samples, which: Integers) -> NDArray[np.int32]:
    ends, sizes = samples.ends[which].tolist(), token_counts(samples)[which].tolist()
    rows = [samples.ids[end - n : end] for end, n in zip(ends, sizes, strict=True)]
    out = np.zeros((len(which), max(1, *map(len, rows))), np.int32)
    for row, ids in zip(out, rows, strict=True):
        row[: len(ids)] = ids
    return out


# ---- evaluation


def accuracy_and_auc(model: Classifier, samples: Samples, labels: Integers, batch_size: int) -> tuple[float, float]:
    """Returns the accuracy on the samples, and the area under the ROC curve.

    With two classes, the area is the second class's; with more, the mean area of each class against all others.
    """
    model.eval()
    order = list(batches_of_similar_length(token_counts(samples), batch_size))
    chances_of = lambda which: np.array(mx.softmax(model(mx.array(pad_samples(samples, which))), axis=-1))
    chances = np.concatenate([chances_of(which) for which in order])
    model.train()
    labels = labels[np.concatenate(order)]
    classes = chances.shape[1]
    area = np.mean([area_under_roc(chances[:, c], labels == c) for c in ([1] if classes == 2 else range(classes))])
    return round(float((chances.argmax(axis=1) == labels).mean()), 4), round(float(area), 4)


def area_under_roc(scores: NDArray[np.floating], positive: NDArray[np.bool_]) -> float:
    """Returns the area under the ROC curve: the probability that a positive sample scores higher than a negative one.

    Ties count half. Returns 0.5 if there are no positive or no negative samples.
    """
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    n, m = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * m)) if n and m else 0.5
