"""Rules on the data's way to the step."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_turbo.doctor.facts import Facts
from lightning_turbo.doctor.rules.rule import Hit, rule

__all__ = ["NOTICEABLE", "WAITING"]

WAITING = 0.10  # share of the step; a choice, not a measurement
NOTICEABLE = 5e-3  # seconds of waiting a step below which nobody would notice
LARGE = 8 * 2**20  # bytes of a batch above which its size matters for copying


def _is_slow(facts: Facts) -> bool:
    return facts.waiting > WAITING and facts.phases["data"] > NOTICEABLE


@rule(
    "waits-for-data",
    "background-prefetch",
    "Load ahead: PrefetchLoader for a background thread or several, PackedDataset for data that fits one file, DALI "
    "for images.",
)
def _waits_for_data(facts: Facts) -> Iterator[Hit]:
    if _is_slow(facts):
        what = f"{facts.waiting:.0%} of the step is spent waiting for data"
        yield Hit(what, facts.loader.site, "{ms} ms a step (measured)", seconds=facts.phases["data"])


@rule(
    "workers",
    "worker-tuning",
    "Set num_workers and prefetch_factor by measurement: lightning_turbo.tune_workers does it. An IterableDataset has "
    "to split itself among workers, by torch.utils.data.get_worker_info().",
)
def _workers(facts: Facts) -> Iterator[Hit]:
    loader, slow = facts.loader, _is_slow(facts)
    count = f"num_workers={loader.workers} on {facts.cores} cores"
    cost = f"part of {facts.phases.get('data', 0.0) * 1e3:.2f} ms of waiting a step (measured)"
    if loader.workers > facts.cores:
        yield Hit(count, loader.site, "memory and switches for each worker", "warning" if slow else "info")
    found = {
        "num_workers=0: batches are loaded between the steps": loader.workers == 0,
        count: 0 < 2 * loader.workers < facts.cores,
        "prefetch_factor=1: one slow sample stalls the step": loader.prefetch_factor == 1,
    }
    for what in (each for each, holds in found.items() if holds and slow and loader.standard):
        yield Hit(what, loader.site, cost)


@rule("pin-memory", "device-prefetch", "DataLoader(pin_memory=True).")
def _pin_memory(facts: Facts) -> Iterator[Hit]:
    loader, size = facts.loader, sum(tensor.bytes for tensor in facts.batch)
    if facts.cuda and loader.standard and not loader.pin_memory:
        what = f"pin_memory=False with batches of {size / 2**20:.1f} MiB"
        cost = f"part of {facts.phases.get('copy', 0.0) * 1e3:.2f} ms of copying a step (measured)"
        yield Hit(what, loader.site, cost, "warning" if size >= LARGE else "info")


@rule(
    "persistent-workers",
    "worker-tuning",
    "DataLoader(persistent_workers=True), unless the dataset changes between epochs; the PrefetchNextEpoch callback "
    "begins an epoch before the last one ends.",
)
def _persistent_workers(facts: Facts) -> Iterator[Hit]:
    loader = facts.loader
    if loader.workers and facts.epochs != 1 and not (loader.persistent_workers or loader.dataset_set_epoch):
        what = f"persistent_workers=False: each epoch starts {loader.workers} new workers"
        cost = "the start of the processes and the import of the program, once an epoch"
        yield Hit(what, loader.site, cost, "warning" if facts.batches is not None and facts.batches < 50 else "info")


@rule(
    "lost-sampler",
    "background-prefetch",
    "Make the loader a plain DataLoader, or a class such as PrefetchLoader that Lightning can give its "
    "DistributedSampler, or set a DistributedSampler yourself.",
)
def _lost_sampler(facts: Facts) -> Iterator[Hit]:
    loader, ranks = facts.loader, facts.world_size
    if ranks > 1 and loader.sharded is False and not loader.iterable_dataset:
        what = f"{loader.type} with sampler {loader.sampler} does not split the data over {ranks} ranks"
        yield Hit(what, loader.site, f"{ranks - 1} of {ranks} ranks do no new work", "error")


@rule(
    "frozen-set-epoch",
    "worker-tuning",
    "persistent_workers=False, or let the workers read the epoch from shared memory.",
)
def _frozen_set_epoch(facts: Facts) -> Iterator[Hit]:
    loader = facts.loader
    if loader.workers and loader.persistent_workers and loader.dataset_set_epoch:
        what = "persistent workers keep the dataset's first copy, so that its set_epoch does not reach them"
        yield Hit(what, loader.site, "wrong order, not time")


@rule(
    "wide-batch",
    "packed-dataset",
    "Load float32, or keep bytes as uint8 to the end and scale them on the device.",
)
def _wide_batch(facts: Facts) -> Iterator[Hit]:
    site = facts.loader.site
    for tensor in facts.batch:
        kind, size, narrow = tensor.dtype.removeprefix("torch."), tensor.bytes / 2**20, tensor.bytes_as_uint8
        if kind in ("float64", "complex128"):
            cost = f"{size:.2f} MiB a batch where half would do"
            yield Hit(f"{tensor.name} is {kind}", site, cost, name=tensor.name, cause=kind)
        elif narrow is not None and tensor.bytes >= LARGE:
            cost = f"{size:.1f} MiB a batch where {narrow / 2**20:.1f} would do"
            yield Hit(f"{tensor.name} holds bytes as {kind}", site, cost, "info", tensor.name, cause=kind)
