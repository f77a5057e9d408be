"""Methods of single objects that are replaced for a time; classes are never changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["ReplacedMethod"]


class ReplacedMethod:
    """A function in place of a method of one object, until ``put_back``.

    What others put there before or after stays, in whatever order they and this one are put back.

    Args:
        owner: The object.
        name: Name of its method.
        function: Called in place of the method, with the method and its arguments.
    """

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._was_own = name in vars(owner)  # otherwise the class gives it
        self._before = getattr(owner, name)
        self._function: Callable[..., Any] | None = function
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; once this is put back, what was there before."""
        if self._function is None:
            return self._before(*args, **kwargs)
        return self._function(self._before, *args, **kwargs)

    def put_back(self) -> None:
        """Put back what was there; under a function that another put on top, only pass calls on."""
        self._function = None
        own = vars(self._owner)
        # Those on top that were put back before this one could only pass calls on until now.
        while isinstance(top := own.get(self._name), ReplacedMethod) and top._function is None:
            if top._was_own:
                own[self._name] = top._before
            else:
                del own[self._name]
