"""The errors and warnings of lightning_turbo: few, each a subclass of the built-in exception that it refines."""

from __future__ import annotations

__all__ = [
    "AmpLookupError",
    "AmpOverrideError",
    "AmpStateError",
    "AmpUsageError",
    "LightningMismatchError",
    "MissingExtraError",
    "NoEffectWarning",
    "TurboError",
    "TurboWarning",
]


class TurboError(Exception):
    """Base of every error raised by lightning_turbo itself."""


class MissingExtraError(TurboError, ModuleNotFoundError):
    """An optional package is not installed; the message names the extra that installs it."""


class LightningMismatchError(TurboError, TypeError):
    """The adapters are bound to one of Lightning's two import names and the program uses the other."""


class AmpUsageError(TurboError, ValueError, RuntimeError):
    """The O0-O3 engine was called wrongly; a ``RuntimeError`` as in apex and a ``ValueError`` as in Python."""


class AmpOverrideError(AmpUsageError, AssertionError):
    """An override has an impossible value; apex raised ``AssertionError``."""


class AmpLookupError(TurboError, IndexError):
    """A ``loss_id`` beyond ``num_losses``."""


class AmpStateError(TurboError, AttributeError, RuntimeError):
    """State was requested before ``initialize``; apex raised ``AttributeError`` or ``RuntimeError``."""


class TurboWarning(UserWarning):
    """Base of every warning issued by lightning_turbo."""


class NoEffectWarning(TurboWarning):
    """A technique was requested and changed nothing."""
