"""The errors and warnings of lightning_turbo: few, and each a subclass of the built-in that it refines."""

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
    """An optional package is absent; the message names the extra that brings it."""


class LightningMismatchError(TurboError, TypeError):
    """The adapters are bound to one of Lightning's two import names, the program uses the other."""


class AmpUsageError(TurboError, ValueError, RuntimeError):
    """A wrong call of the O0-O3 engine; a ``RuntimeError`` as in apex and a ``ValueError`` as in Python."""


class AmpOverrideError(AmpUsageError, AssertionError):
    """An override with an impossible value, where apex raised ``AssertionError``."""


class AmpLookupError(TurboError, IndexError):
    """A ``loss_id`` beyond ``num_losses``."""


class AmpStateError(TurboError, AttributeError, RuntimeError):
    """State was asked for before ``initialize``, where apex raised ``AttributeError`` or ``RuntimeError``."""


class TurboWarning(UserWarning):
    """Base of every warning issued by lightning_turbo."""


class NoEffectWarning(TurboWarning):
    """A technique was asked for and changed nothing."""
