"""Does the order of an epoch teach a model as well as a full shuffle? A small GPT is trained for
one epoch on a text corpus that is made here, with its rows in each of the orders, and then asked
about rows that it has not seen.

The corpus lies as corpora do: texts of one topic are neighbours, so file order is the worst order.
A topic is a language of its own, a Markov chain; what is held out has all of them alike. The
shuffle buffer holds 5 % of the rows: less than a topic, as REIMU's holds less than a file.
"""

import math
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from report import Row
from torch import Tensor, nn
from torch.nn import functional

from aifs.datasets.index import IndexedFile, RowBlock, Version, index_of
from aifs.datasets.sequence import Epoch, EpochOrder, permuted

SHUFFLES = ("rows", "blocks", "window", "none")
TOPICS = 10
VOCABULARY = 32
ROW = 32
"""Tokens of a row, a byte each."""

BATCH = 32
STEPS = 400
BLOCK_ROWS = 16
SHARES = 64
BUFFER_PART = 20
"""The shuffle buffer is one such part of the rows."""

RATE = 4e-3
WIDTH, HEADS, LAYERS = 64, 4, 2
HELD_OUT = 1024
NOISE_NATS = 0.02
"""What two seeds of the same shuffle may differ by."""


def measure(seeds: int, steps: int = STEPS) -> list[dict[str, Any]]:
    """For each seed and shuffle, in turns: the loss (nats per token) on what was held out, after an
    epoch, and what it was on the way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same sums in the same order on any machine
    rng = np.random.default_rng(0)
    languages = [_language(rng) for _ in range(TOPICS)]
    held_out = torch.from_numpy(
        np.concatenate([_rows(rng, each, HELD_OUT // TOPICS) for each in languages])
    )
    corpus = torch.from_numpy(
        np.concatenate([_rows(rng, each, BATCH * steps // TOPICS) for each in languages])
    )
    found = []
    for seed in range(seeds):
        for shuffle in SHUFFLES:
            curve = _train(corpus, _sequence(len(corpus), shuffle, seed), seed, held_out.long())
            found.append({"shuffle": shuffle, "seed": seed, "loss": curve[-1][1], "curve": curve})
    torch.set_num_threads(threads)
    return found


def _sequence(rows: int, shuffle: str, seed: int) -> list[int]:
    """The numbers of all rows in the order of an epoch."""
    blocks = [RowBlock(at, BLOCK_ROWS, BLOCK_ROWS) for at in range(0, rows, BLOCK_ROWS)]
    index = index_of("records", [IndexedFile(b"corpus", Version(rows, 0), blocks)])
    group = max(1, rows // BUFFER_PART // SHARES)
    epoch = Epoch(index, EpochOrder(seed, shares=SHARES, group=group, shuffle=shuffle))
    shares = [_rows_of(epoch, share) for share in range(SHARES)]
    return [next(shares[number % SHARES]) for number in range(rows)]


def _rows_of(epoch: Epoch, share: int) -> Iterator[int]:
    for group in epoch.groups(share):
        held = [
            piece.block * BLOCK_ROWS + piece.first + row
            for piece in group.pieces
            for row in range(piece.rows)
        ]
        for number in range(group.rows):
            at = group.start + number * group.step
            yield held[at if group.key is None else permuted(at, group.size, group.key)]


def _language(rng: np.random.Generator) -> np.ndarray:
    """The chances of each token after each: a few that are likely, others that are not."""
    return rng.dirichlet(np.full(VOCABULARY, 0.05), size=VOCABULARY)


def _rows(rng: np.random.Generator, language: np.ndarray, count: int) -> np.ndarray:
    """Rows of text of one topic: (count, ROW) bytes."""
    steps = language.cumsum(axis=1)
    rows = np.empty((count, ROW), dtype=np.uint8)
    rows[:, 0] = rng.integers(VOCABULARY, size=count)
    for column in range(1, ROW):
        chances = steps[rows[:, column - 1]]
        rows[:, column] = (chances < rng.random((count, 1))).sum(axis=1).clip(max=VOCABULARY - 1)
    return rows


def _train(
    corpus: Tensor, sequence: list[int], seed: int, held_out: Tensor
) -> list[tuple[int, float]]:
    """The loss after every eighth of the epoch."""
    torch.manual_seed(seed)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    batches = torch.tensor(sequence).split(BATCH)
    curve = []
    for step, numbers in enumerate(batches, 1):
        optimizer.zero_grad()
        _loss(model, corpus[numbers].long()).backward()
        optimizer.step()
        if step % (len(batches) // 8) == 0:
            curve.append((step, _held_out_loss(model, held_out)))
    return curve


def _held_out_loss(model: nn.Module, held_out: Tensor) -> float:
    with torch.no_grad():
        return float(_loss(model, held_out))


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class Gpt(nn.Module):
    """Tokens (batch, tokens) to logits; as GPT-2, small."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(ROW, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.tokens(tokens) + self.positions.weight[:length]
        return self.head(self.norm(self.layers(x, mask=mask, is_causal=True)))


def summary(found: list[dict[str, Any]]) -> dict[str, tuple[float, float, float]]:
    """By shuffle: mean and standard deviation of the losses over the seeds, and the mean's
    perplexity."""
    result = {}
    for shuffle in SHUFFLES:
        losses = [one["loss"] for one in found if one["shuffle"] == shuffle]
        mean = statistics.mean(losses)
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        result[shuffle] = (mean, spread, math.exp(mean))
    return result


def quality_rows(seeds: int, steps: int) -> list[Row]:
    """Losses of a small GPT by the shuffle of its rows; ``plain`` is the full shuffle."""
    found = measure(seeds, steps)
    means = summary(found)
    full, spread, _ = means["rows"]
    return [
        Row(
            f"loss of a small GPT, shuffle={shuffle}",
            f"full shuffle {full:.3f} nats",
            None,
            None,
            None,
            f"{mean:.3f} nats, perplexity {perplexity:.2f}",
            f"<= full + {NOISE_NATS:g}" if shuffle == "blocks" else "",
            shuffle != "blocks" or mean <= full + NOISE_NATS,
        )
        for shuffle, (mean, _, perplexity) in means.items()
    ]
