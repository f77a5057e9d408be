"""What ``ExactResume`` adds to a checkpoint, and what a run that goes on needs of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import inf
from typing import Any

from lightning_turbo._distributed import rank_and_size
from lightning_turbo.callbacks.resume import counters
from lightning_turbo.callbacks.resume.random_states import derive_random_states
from lightning_turbo.data.loading.epoch_state import used_states

__all__ = ["KEY", "RankState", "Restored", "Validation", "restored_from"]

KEY = "lightning_turbo.exact_resume"


@dataclasses.dataclass(frozen=True)
class Validation:
    """The validation before or in which a checkpoint was saved.

    Attributes:
        due: Whether its training batch was made and it has not ended: it is made, whole, before the next batch.
        random: The states of the random generators at its beginning, if it had begun.
        loaders: The states of its loaders as it began; if none is due, as the next one finds them.
        reloaded: The epoch in which Lightning made these loaders; ``-inf`` for those of its check before the training.
    """

    due: bool = False
    random: dict[str, Any] | None = None
    loaders: Sequence[Any] = ()
    reloaded: float = -inf


@dataclasses.dataclass(frozen=True)
class RankState:
    """What a checkpoint holds of one rank under ``KEY``, beside what Lightning saves of rank 0 alone.

    ``ExactResume`` makes one when a checkpoint is saved, and reads those of all ranks when one is loaded. A field has
    its default if the checkpoint does not tell it.

    Attributes:
        random: The states of this rank's random generators.
        ranks: How many ranks the run has; 0 if the checkpoint does not tell.
        batch_sizes: Those of the training loaders with a state.
        accumulate_grad_batches: The length of an accumulation window.
        counted: What ``counters.is_counted`` returned.
        monitored: What ``schedulers.monitored`` returned.
        plateaus: What ``schedulers.plateaus_wait`` returned.
        loaders: The states of the training loaders with a state; ``None`` for those that Lightning saved of rank 0.
        exhausted: Of each training loader, whether a pass over it has ended, where loaders begin again within an epoch;
            empty where they do not.
        loader_generators: The states of the random generators that each training loader which does not count its
            batches, its samplers and, without worker processes, its dataset hold.
        validation: A ``Validation``.
    """

    random: dict[str, Any] | None = None
    ranks: int = 0
    batch_sizes: list[int] = dataclasses.field(default_factory=list)
    accumulate_grad_batches: int | None = None
    counted: bool | None = None
    monitored: dict[str, Any] | None = None
    plateaus: bool = False
    loaders: list[Any] | None = None
    exhausted: list[bool] = dataclasses.field(default_factory=list)
    loader_generators: list[list[Any]] = dataclasses.field(default_factory=list)
    validation: Validation | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of tensors and plain Python objects, which loads with ``weights_only=True``."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {**fields, "validation": dataclasses.asdict(self.validation) if self.validation else None}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> RankState:
        """Return the state of which ``to_dict`` made a dictionary."""
        told = fields.get("validation")
        return cls(**{**fields, "validation": None if told is None else Validation(**told)})


@dataclasses.dataclass(frozen=True)
class Restored:
    """What the start of the training needs of a checkpoint, on this rank.

    ``restored_from`` makes it when the checkpoint is read, and ``ExactResume`` keeps it until the training starts.

    Attributes:
        place: Where the checkpoint was saved. It is not ``over`` if a validation is due, though the loaders are at
            their end.
        loaders: The states of the training loaders, with the batches that were used of their epoch.
        generators: ``loader_generators`` of this rank.
        exhausted: ``exhausted`` of this rank.
        ranks: How many ranks the run had, 0 if the checkpoint does not tell.
        batch_sizes: Those of its training loaders, empty if the checkpoint does not tell.
        random: The states of this rank's random generators, if the checkpoint has them.
        monitored: The values that schedulers wait for, if the checkpoint tells.
        waits: What is over, of ``"step"`` and ``"epoch"``, without what Lightning does after it: it updates schedulers
            that wait for a value, and counts the logged step.
        validation: What the next validation begins with.
    """

    place: counters.Place
    loaders: list[Any]
    generators: list[list[Any]]
    exhausted: list[bool]
    ranks: int
    batch_sizes: list[int]
    random: dict[str, Any] | None
    monitored: dict[str, Any] | None
    waits: list[str]
    validation: Validation


def restored_from(trainer: Any, checkpoint: dict[str, Any]) -> Restored:
    """Correct the counters in a checkpoint before Lightning reads them, and return what is restored after that."""
    fit = checkpoint["loops"]["fit_loop"]
    ranks = [RankState.from_dict(each) for each in checkpoint.get(KEY, [])]
    first = ranks[0] if ranks else RankState()
    own = _own_state(ranks)
    # Lightning is to find none: it would load them where its loaders are set up after this, and drop them where they
    # were set up before. ``on_train_start`` loads them in both cases.
    of_rank_0 = fit["state_dict"].pop("combined_loader", [])
    place = counters.place_of(trainer, fit)
    loaders = used_states(of_rank_0 if own.loaders is None else own.loaders, over=place.over, used=place.used)
    validation = own.validation or Validation(due=counters.is_within_validation(fit))
    waits = _waits(first, place, fit, validation)
    if validation.due:
        counters.begin_validation_again(fit)
        place = place._replace(over=False)
    if place.is_between_epochs:
        counters.complete_epoch(fit, counted=bool(first.counted))
    else:
        counters.reopen_epoch(fit)
        counters.forget_step(fit)
    return Restored(
        place=place,
        loaders=loaders,
        generators=own.loader_generators,
        exhausted=own.exhausted,
        ranks=first.ranks or len(ranks),
        batch_sizes=first.batch_sizes,
        random=own.random,
        monitored=first.monitored,
        waits=waits,
        validation=validation,
    )


def _own_state(ranks: list[RankState]) -> RankState:
    """Return the state of this rank; one that the run did not have takes that of rank 0, with random states of its own.

    Args:
        ranks: The states of all ranks; none if the checkpoint has none.
    """
    rank, _ = rank_and_size()
    if not ranks:
        return RankState()
    if rank < len(ranks):
        return ranks[rank]
    first = ranks[0]
    random = None if first.random is None else derive_random_states(first.random, rank)
    return dataclasses.replace(first, random=random)


def _waits(first: RankState, place: counters.Place, fit: dict[str, Any], validation: Validation) -> list[str]:
    """Return what is over without what Lightning does after it. A validation that is due comes before that."""
    if validation.due:
        return []
    waits = ["step"] if first.counted is False and counters.is_after_step(fit) else []
    return [*waits, "epoch"] if place.over and first.plateaus else waits
