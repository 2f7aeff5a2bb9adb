"""How a broken contract with a library is reported."""

from collections.abc import Callable
from importlib.metadata import version


def fix(library: str, function: Callable) -> str:
    """Return the message of a failed contract test.

    Args:
        library: Name on the package index.
        function: Our function that relies on private API of the library.
    """
    file = f"{function.__module__.replace('.', '/')}.py"
    return f"{library} {version(library)} does not fit {file}::{function.__qualname__}: fix it there"
