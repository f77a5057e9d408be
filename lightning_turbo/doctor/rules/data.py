"""Rules on the data's way to the step."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_turbo.doctor.advice import Hit, rule
from lightning_turbo.doctor.facts import Facts

__all__ = [
    "frozen_set_epoch",
    "lost_sampler",
    "page_faults",
    "persistent_workers",
    "pin_memory",
    "waits_for_data",
    "wide_batch",
    "workers",
]

WAITING = 0.10
"""Share of the step spent waiting for data above which loading counts as slow; 10 % is a choice, not a measurement."""

NOTICEABLE = 5e-3
"""Seconds of waiting a step below which nobody would notice."""

LARGE = 8 * 2**20
"""Bytes of a batch above which its size matters for copying."""

FAULT = 0.5e-6
"""Seconds that a page fault costs at least, filling its page with zeros included: a guess for a machine of its own.
Virtual machines pay more."""


def _share(facts: Facts) -> float:
    return facts.phases.get("data", 0.0) / facts.step if facts.step else 0.0


def _slow(facts: Facts) -> bool:
    return _share(facts) > WAITING and facts.phases.get("data", 0.0) > NOTICEABLE


@rule(
    name="waits-for-data",
    symptom="The step waits for data; the GPU's utilisation comes and goes.",
    threshold="the median step waits for data more than 10 % of its time, and more than 5 ms",
    remedy="Load ahead: PrefetchLoader for a background thread or several (threads), PackedDataset for data "
    "that fits one file, DALI for images.",
    card="background-prefetch",
)
def waits_for_data(facts: Facts) -> Iterator[Hit]:
    """The step waits for its batch."""
    if _slow(facts):
        seconds = facts.phases["data"]
        yield Hit(
            what=f"{_share(facts):.0%} of the step is spent waiting for data",
            site=facts.loader.site if facts.loader else None,
            cost=f"{seconds * 1e3:.2f} ms a step (measured)",
            seconds=seconds,
        )


@rule(
    name="workers",
    symptom="The step waits for data, though cores are free.",
    threshold="the step waits for data (see waits-for-data) and the loader has no workers, fewer than half of the "
    "cores, a prefetch_factor of 1, or more workers than cores",
    remedy="Set num_workers and prefetch_factor by measurement: lightning_turbo.tune_workers does it. An "
    "IterableDataset has to split itself among workers, by torch.utils.data.get_worker_info().",
    card="worker-tuning",
)
def workers(facts: Facts) -> Iterator[Hit]:
    """Worker settings that do not fit a loader that is too slow."""
    loader = facts.loader
    if loader is None or not loader.standard:
        return
    if loader.workers > facts.cores:
        yield Hit(
            level="warning" if _slow(facts) else "info",
            what=f"num_workers={loader.workers} on {facts.cores} cores",
            site=loader.site,
            cost="memory for each worker, and switches between them",
        )
    if not _slow(facts):
        return
    seconds = facts.phases["data"]
    cost = f"part of {seconds * 1e3:.2f} ms of waiting a step (measured)"
    if loader.workers == 0:
        yield Hit(what="num_workers=0: batches are loaded between the steps", site=loader.site, cost=cost)
    elif 2 * loader.workers < facts.cores:
        yield Hit(what=f"num_workers={loader.workers} on {facts.cores} cores", site=loader.site, cost=cost)
    if loader.workers and loader.prefetch_factor == 1:
        yield Hit(what="prefetch_factor=1: one slow sample stalls the step", site=loader.site, cost=cost)


@rule(
    name="pin-memory",
    symptom="Copies from host to device take long and overlap with nothing.",
    threshold="a CUDA run whose loader has pin_memory=False; info for batches below 8 MiB",
    remedy="DataLoader(pin_memory=True).",
    card="device-prefetch",
)
def pin_memory(facts: Facts) -> Iterator[Hit]:
    """Batches in pageable memory."""
    loader = facts.loader
    if facts.cuda and loader is not None and loader.standard and not loader.pin_memory:
        size = sum(tensor.bytes for tensor in facts.batch)
        seconds = facts.phases.get("copy", 0.0)
        yield Hit(
            level="warning" if size >= LARGE else "info",
            what=f"pin_memory=False with batches of {size / 2**20:.1f} MiB",
            site=loader.site,
            cost=f"part of {seconds * 1e3:.2f} ms of copying a step (measured)",
        )


@rule(
    name="persistent-workers",
    symptom="A pause at the start of every epoch.",
    threshold="several epochs, workers, and persistent_workers=False; always info unless epochs have fewer than 50 "
    "batches",
    remedy="DataLoader(persistent_workers=True), unless the data set changes between epochs; the PrefetchNextEpoch "
    "callback begins an epoch before the last one ends.",
    card="worker-tuning",
)
def persistent_workers(facts: Facts) -> Iterator[Hit]:
    """Workers that are started anew for each epoch."""
    loader = facts.loader
    if loader is None or not loader.standard or not loader.workers or loader.persistent_workers:
        return
    if facts.epochs != 1 and not loader.dataset_set_epoch:
        short = facts.batches is not None and facts.batches < 50
        yield Hit(
            level="warning" if short else "info",
            what=f"persistent_workers=False: {loader.workers} workers are started anew for each epoch",
            site=loader.site,
            cost="the start of the processes and the import of the program, once an epoch",
        )


@rule(
    name="lost-sampler",
    symptom="More ranks do not train faster: every rank sees the same data.",
    threshold="several ranks, and a DataLoader, or one within a loader of another kind, whose sampler is one of "
    "torch's that do not split the data",
    remedy="Make the loader a plain DataLoader, or a class such as PrefetchLoader that Lightning can give its "
    "DistributedSampler, or set a DistributedSampler yourself.",
    card="background-prefetch",
)
def lost_sampler(facts: Facts) -> Iterator[Hit]:
    """Every rank trains on the same batches."""
    loader = facts.loader
    if facts.world_size > 1 and loader is not None and loader.sharded is False and not loader.iterable_dataset:
        yield Hit(
            level="error",
            what=f"{loader.type} with sampler {loader.sampler} does not split the data over {facts.world_size} ranks",
            site=loader.site,
            cost=f"{facts.world_size - 1} of {facts.world_size} ranks do no new work",
        )


@rule(
    name="frozen-set-epoch",
    symptom="The data set's set_epoch has no effect: every epoch shows the same order or augmentation.",
    threshold="workers, persistent_workers=True and a data set with set_epoch",
    remedy="persistent_workers=False, or let the workers read the epoch from shared memory.",
    card="worker-tuning",
)
def frozen_set_epoch(facts: Facts) -> Iterator[Hit]:
    """``set_epoch`` reaches the main process's copy of the data set only."""
    loader = facts.loader
    if loader is not None and loader.workers and loader.persistent_workers and loader.dataset_set_epoch:
        yield Hit(
            what="persistent workers keep the data set's first copy, so that its set_epoch does not reach them",
            site=loader.site,
            cost="wrong order, not time",
        )


@rule(
    name="wide-batch",
    symptom="Batches are larger than what they hold: loading, pinning and copying take longer.",
    threshold="float64 tensors in the batch; info for float32 of at least 8 MiB that hold only 0..255 or 255ths",
    remedy="Load float32, or keep bytes as uint8 to the end and scale them on the device.",
    card="packed-dataset",
)
def wide_batch(facts: Facts) -> Iterator[Hit]:
    """Batches in a wider type than needed."""
    for tensor in facts.batch:
        if tensor.dtype in ("torch.float64", "torch.complex128"):
            yield Hit(
                what=f"{tensor.name} is {tensor.dtype.removeprefix('torch.')}",
                site=facts.loader.site if facts.loader else None,
                cost=f"{tensor.bytes / 2**20:.2f} MiB a batch where half would do",
            )
        elif tensor.bytes_as_uint8 is not None and tensor.bytes >= LARGE:
            yield Hit(
                level="info",
                what=f"{tensor.name} holds bytes as {tensor.dtype.removeprefix('torch.')}",
                site=facts.loader.site if facts.loader else None,
                cost=f"{tensor.bytes / 2**20:.1f} MiB a batch where {tensor.bytes_as_uint8 / 2**20:.1f} would do",
            )


@rule(
    name="page-faults",
    symptom="The processor works for the kernel (sys, in time or top) while batches are put together, or in a step on "
    "the CPU.",
    threshold="1,000 page faults a step or more, which at 0.5 us each are 2 % of it or more, without worker processes, "
    "where the kernel has large pages for who asks and torch is not told to; always info, since the cost is a guess",
    remedy="Set THP_MEM_ALLOC_ENABLE=1 in the environment before the program starts.",
    card="huge-pages",
)
def page_faults(facts: Facts) -> Iterator[Hit]:
    """Large tensors whose memory comes anew from the kernel, in small pages."""
    seconds = facts.page_faults * FAULT
    workers = facts.loader.workers if facts.loader else 0  # their batches come in shared memory, which stays as it is
    if facts.spare_huge_pages and not workers and facts.page_faults >= 1000 and seconds >= 0.02 * facts.step:
        yield Hit(
            level="info",
            what=f"{facts.page_faults} page faults a step: large tensors are made in small pages",
            site=None,
            cost=f"{seconds * 1e3:.2f} ms a step or more (a guess, at 0.5 us each)",
        )
