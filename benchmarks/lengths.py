"""The suite ``lengths``: an epoch of a small transformer over texts of different lengths, batched in four ways."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from benchmarks.suite import Aim, Case, CaseTimer, Suite
from lightning_turbo.data import LengthBatchSampler

__all__ = ["SUITE", "SortedInChunks", "count_words"]

BATCH = 8
LONGEST = 256  # words; longer texts are truncated, as by a tokenizer
WORDS = 1000  # size of the vocabulary


def count_words(most: int) -> list[int]:
    """Return the numbers of words of real texts that every machine has: the docstrings of torch's public names."""
    texts = {}
    for module in (torch, nn, nn.functional, torch.optim, torch.linalg, torch.distributions, torch.utils.data):
        for name, value in sorted(vars(module).items()):
            text = None if name.startswith("_") else inspect.getdoc(value)
            if text and callable(value):
                texts[f"{module.__name__}.{name}"] = min(len(text.split()), LONGEST)
    return [length for length in texts.values() if length > 3][:most]


class SortedInChunks(BatchSampler):
    """Shuffles the samples and sorts chunks by length, as ``group_by_length`` of Hugging Face does.

    As there, a chunk has a quarter of the batches of an epoch, and at most fifty.
    """

    def __init__(self, lengths: list[int], batch_size: int) -> None:
        super().__init__(RandomSampler(lengths), batch_size, drop_last=False)
        self.lengths = lengths
        self.chunk = batch_size * max(1, min(50, len(lengths) // (4 * batch_size)))

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(self.sampler)
        while chunk := list(itertools.islice(order, self.chunk)):
            chunk.sort(key=lambda index: -self.lengths[index])
            yield from (chunk[start : start + self.batch_size] for start in range(0, len(chunk), self.batch_size))


def _shuffled(lengths: list[int]) -> Iterable[list[int]]:
    return BatchSampler(RandomSampler(lengths), BATCH, drop_last=False)


def _by_number(lengths: list[int]) -> Iterable[list[int]]:
    return LengthBatchSampler(lengths, batch_size=BATCH, seed=0)


def _by_cost(lengths: list[int]) -> Iterable[list[int]]:
    # As many elements as BATCH texts of mean length, so that the number of batches is about the same.
    mean = sum(lengths) / len(lengths)
    return LengthBatchSampler(lengths, max_cost=max(LONGEST, int(BATCH * mean)), seed=0)


ORDERS: dict[str, Callable[[list[int]], Iterable[list[int]]]] = {
    "shuffled": _shuffled,
    "sorted within chunks": lambda lengths: SortedInChunks(lengths, BATCH),
    "LengthBatchSampler(batch_size=)": _by_number,
    "LengthBatchSampler(max_cost=)": _by_cost,
}


class _Net(nn.Module):
    """A transformer of two layers that classifies texts."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 64, padding_idx=0)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 2)

    def forward(self, texts: Tensor) -> Tensor:
        padding = texts == 0
        found = self.layers(self.words(texts), src_key_padding_mask=padding)
        return self.head(found.masked_fill(padding[..., None], 0).sum(1))


def epochs(timer: CaseTimer, order: str, texts: int = 967) -> dict[str, float]:
    """Train whole epochs, one per step, and return the fraction of padding and the number of batches of an epoch."""
    lengths = count_words(128 if timer.quick else texts)
    data = [torch.randint(1, WORDS, (length,)) for length in lengths]
    pad = nn.utils.rnn.pad_sequence
    loader = DataLoader(
        data,  # pyright: ignore[reportArgumentType]
        batch_sampler=ORDERS[order](lengths),
        collate_fn=lambda samples: pad(samples, batch_first=True),
    )
    net = _Net().to(timer.device)
    optimizer = torch.optim.AdamW(net.parameters())
    padding, number = 0.0, 0
    while timer.step(samples=len(lengths)):
        elements, words, number = 0, 0, 0
        for batch in loader:
            batch = batch.to(timer.device)
            nn.functional.cross_entropy(net(batch), batch[:, 0] % 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            elements += batch.numel()
            words += int((batch != 0).sum())
            number += 1
        padding = 1 - words / elements
    return {"padding": padding, "batches": number}


CASES = [
    Case(
        name=name,
        run=epochs,
        config={"order": name},
        kind={"shuffled": "torch", "sorted within chunks": "peer"}.get(name, "ours"),
        against=("sorted within chunks",) if name.startswith("Length") else (),
    )
    for name in ORDERS
]

SUITE = Suite(
    name="lengths",
    about="An epoch of a transformer (two layers of width 64) over torch's docstrings, in batches of about 8 texts. "
    "The process keeps the memory that it frees.",
    cases=CASES,
    aims=[Aim("LengthBatchSampler(batch_size=)", "sorted within chunks", 1.0)],
    quick=("shuffled", "LengthBatchSampler(batch_size=)"),
    unit="epoch",
    # glibc returns large blocks of memory to the system at once. Batches that get shorter one after another, as within
    # sorted chunks, then need new memory less often than batches in another order, which alone made them 1.07 times as
    # fast.
    environment={"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"},
    steps=1,
    rounds=7,
    warmup=1,
)
