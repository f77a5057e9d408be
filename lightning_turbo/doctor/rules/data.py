"""Rules about the path of the data to the step."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_turbo.doctor.facts import NOTICEABLE, Facts
from lightning_turbo.doctor.rules.rule import Hit, rule

__all__: list[str] = []

LARGE = 8 * 2**20  # bytes of a batch above which its copy takes noticeable time
MANY = 32  # tensors per batch from which passing them between processes matters


def _is_slow(facts: Facts) -> bool:
    return facts.bound == "data" and facts.phases["data"] > NOTICEABLE


FASTER = "PackedDataset serves data that fits one file, DALI images."


@rule(
    "waits-for-data",
    "background-prefetch",
    "Load ahead: PrefetchLoader for a background thread or several, where loading reads files or computes in NumPy or "
    "torch; DataLoader(num_workers=1, persistent_workers=True) where it computes in Python, which holds the GIL. "
    f"{FASTER}",
    by_time=True,
)
def _waits_for_data(facts: Facts) -> Iterator[Hit]:
    if facts.bound != "data":
        return
    # The remedy depends on how long the step waits, and on whether something already loads ahead.
    what = f"{facts.waiting:.0%} of the step is spent waiting for data"
    remedy = ""
    if not _is_slow(facts):
        remedy = (
            "The wait is too short for a thread or a process. PackedDataset, or a dataset with __getitems__, loads a "
            "batch by one call; larger batches need fewer calls."
        )
    elif facts.loader.draws:
        # Such a loader loads in the calling thread, so a background thread would have no effect.
        remedy = (
            f"{facts.loader.draws[:1].upper()}{facts.loader.draws[1:]}, so that loading stays in the calling thread: "
            "DataLoader(num_workers=1, persistent_workers=True) loads ahead in a process, with Prefetch() behind it. "
            "Then raise num_workers as long as it helps."
        )
    elif facts.loader.prefetches:
        remedy = f"The background thread is too slow: raise threads, or num_workers. {FASTER}"
    elif facts.loader.workers:
        remedy = f"The worker processes are too slow: raise num_workers, or load less. {FASTER}"
    level = "warning" if _is_slow(facts) else "info"
    yield Hit(what, facts.loader.site, "{ms} ms a step (measured)", level, seconds=facts.phases["data"], remedy=remedy)


@rule(
    "workers",
    "worker-tuning",
    "Set num_workers by measurement: lightning_turbo.tune_workers does it. An IterableDataset has "
    "to split itself among workers, by torch.utils.data.get_worker_info().",
    by_time=True,
)
def _workers(facts: Facts) -> Iterator[Hit]:
    workers = facts.loader.workers
    slow = _is_slow(facts)
    ranks = facts.run.local_ranks
    where = f" in each of {ranks} ranks" if ranks > 1 else ""
    what = f"num_workers={workers}{where} on {facts.run.cores} cores"
    cost = "part of what the step waits for data"
    # Too many workers are reported for any step, because they cost memory; too few only if the step waits for them.
    # Ranks may share the cores or have their own, so the message must be true in both cases.
    if workers > facts.run.cores:
        yield Hit(what, facts.loader.site, "memory and switches for each worker", "warning" if slow else "info")
    elif slow and facts.loader.standard and 2 * workers * ranks < facts.run.cores:
        if workers == 0 and not facts.loader.prefetches:
            what += ": batches are loaded between the steps"
        yield Hit(what, facts.loader.site, cost)


@rule("pin-memory", "device-prefetch", "DataLoader(pin_memory=True).")
def _pin_memory(facts: Facts) -> Iterator[Hit]:
    loader = facts.loader
    size = facts.batch
    # One thread pins all tensors one at a time, which costs more than it saves for many tensors outside one buffer.
    few = facts.objects < MANY or loader.prefetches
    if facts.cuda and loader.standard and not loader.pin_memory and few:
        what = f"pin_memory=False with batches of {size / 2**20:.1f} MiB"
        cost = f"part of {facts.phases.get('copy', 0.0) * 1e3:.2f} ms of copying a step (measured)"
        yield Hit(what, loader.site, cost, "warning" if size >= LARGE else "info")


@rule(
    "many-objects",
    "background-prefetch",
    "Prefetch() in the Trainer's callbacks, or PrefetchLoader, hands small tensors over in one buffer. Or put what the "
    "samples have into few tensors: a collate_fn that concatenates them, with one tensor of their lengths.",
    by_time=True,
)
def _many_objects(facts: Facts) -> Iterator[Hit]:
    loader = facts.loader
    # A PrefetchLoader passes the small tensors of a batch in one buffer.
    if loader.workers and facts.objects >= MANY and not loader.prefetches:
        what = (
            f"each batch crosses from worker to trainer as {facts.objects} tensors, each with a file descriptor and a "
            "segment of shared memory of its own"
        )
        waits = facts.bound == "data"
        seconds = facts.phases.get("data", 0.0)
        cost = "part of {ms} ms a step of waiting for data (measured)" if waits else "time of the workers"
        yield Hit(what, loader.site, cost, "warning" if waits else "info", seconds=seconds if waits else 0.0)


@rule(
    "lost-sampler",
    "background-prefetch",
    "Make the loader a plain DataLoader, or a class such as PrefetchLoader that Lightning can give its "
    "DistributedSampler, or set a DistributedSampler yourself.",
)
def _lost_sampler(facts: Facts) -> Iterator[Hit]:
    loader = facts.loader
    ranks = facts.run.world_size
    # ``None`` means a sampler that may split the data itself; an IterableDataset has no sampler to lose. A user who
    # disables the Trainer's sampler splits the data in another way.
    lost = loader.sharded is False and not loader.iterable_dataset and facts.run.gives_sampler
    if ranks > 1 and lost:
        what = f"{loader.type} with sampler {loader.sampler} does not split the data over {ranks} ranks"
        yield Hit(what, loader.site, f"{ranks - 1} of {ranks} ranks do no new work", "error")


@rule("wide-batch", "packed-dataset", "Load float32, or uint8 that Normalize scales on the device.")
def _wide_batch(facts: Facts) -> Iterator[Hit]:
    for name in facts.wide:
        cost = "twice the bytes to load, to pin and to copy"
        yield Hit(f"{name} has double precision", facts.loader.site, cost, name=name, cause="wide")


@rule(
    "repeated-draws",
    "sample-seeds",
    "PrefetchLoader(sample_seeds=SEED) or seed_samples; or draw from the generators of torch, NumPy or Python, which "
    "differ between workers; or seed this one in worker_init_fn.",
)
def _repeated_draws(facts: Facts) -> Iterator[Hit]:
    for name in facts.loader.copied_generators:
        what = (
            f"each of {facts.loader.workers} workers has a copy of {name} in the same state, and draws the same numbers"
        )
        yield Hit(what, facts.loader.site, "no time; augmentation that repeats itself", "info")
