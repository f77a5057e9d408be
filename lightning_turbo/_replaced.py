"""Temporary replacements of methods of single objects; classes are never changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["ReplacedMethod"]


class ReplacedMethod:
    """A function that replaces a method of one object, from construction to ``put_back``.

    Replacements by others, earlier or later, stay in effect, in whatever order they and this one are put back.

    Args:
        owner: The object.
        name: Name of its method.
        function: Called in place of the method, with the original method and the arguments.
    """

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._was_own = name in vars(owner)  # otherwise the class has it
        self._before = getattr(owner, name)
        self._function: Callable[..., Any] | None = function
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, or the original method after ``put_back``."""
        if self._function is None:
            return self._before(*args, **kwargs)
        return self._function(self._before, *args, **kwargs)

    def put_back(self) -> None:
        """Restore the original method. Under another replacement, this one forwards calls until that one is gone."""
        self._function = None
        own = vars(self._owner)
        # Replacements on top that were put back earlier are still there and forward calls; they can go now.
        while isinstance(top := own.get(self._name), ReplacedMethod) and top._function is None:
            if top._was_own:
                own[self._name] = top._before
            else:
                del own[self._name]
