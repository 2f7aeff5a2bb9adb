"""How a broken contract with a library is reported."""

from collections.abc import Callable
from importlib.metadata import version


def mend(library: str, function: Callable) -> str:
    """What a contract test says when it fails.

    Args:
        library: Its name on the package index.
        function: What of ours rests on the library's private part.
    """
    file = f"{function.__module__.replace('.', '/')}.py"
    return f"{library} {version(library)} is not as {file}::{function.__qualname__} needs it: mend it there"
