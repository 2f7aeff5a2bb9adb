"""Environments for tests: a counter whose tools misbehave, and classes that are not environments."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

state = {"made": 0}


class Counter:
    """Counts up to the row's target."""

    def __init__(self) -> None:
        state["made"] += 1
        self.total, self.target = 0, None

    def reset(self, target: int = 0, hint: str | None = None, **_: Any) -> str | None:
        if hint == "sleeps":
            time.sleep(1000)
        if hint == "raises":
            raise LookupError("no such hint")
        self.target = target
        return " Random: " + str(random.random()) if hint == "random" else " Pid: " + str(
            os.getpid()) if hint == "pid" else hint

    def add(self, number: int) -> str:
        """Add to the total.

        Args:
            number: What to add.
        """
        self.total += number
        return f"{self.total}"

    async def later(self, number: int, times: list[int] | None = None) -> dict:
        """Add, after a while.

        Args:
            number: What to add.
            times: How often, each.
        """
        await asyncio.sleep(0)
        self.total += number * sum(times or [1])
        return {"total": self.total, "ä": None}

    def misbehave(self, how: str) -> Any:
        """Misbehave.

        Args:
            how: In which way.
        """
        if how == "sleeps":
            time.sleep(1000)
        elif how == "exits":
            os._exit(3)
        elif how == "leaves":
            sys.exit("gone")
        elif how == "kills":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "raises":
            raise ValueError("no")
        elif how == "floods":
            return "flood " * 100_000
        elif how == "half":
            return "a\ud800b"
        elif how == "starts":
            return str(subprocess.Popen(["sleep", "1000"]).pid)
        elif how == "forks":
            os.fork()
            return "two"
        elif how == "eats":
            bytearray(8 * 2**30)
        elif how == "object":
            return {1, 2}
        return how

    def get_reward(self) -> float | None:
        if self.total == 666:
            return float("nan")
        if self.total == 667:
            raise RuntimeError("no reward")
        return None if self.total == 668 else float(self.total == self.target)

    def _private(self) -> None: ...


def factory() -> Counter:
    return Counter()


def broken_factory() -> Counter:
    raise OSError("no display")


class NoReset:
    def add(self, number: int) -> int:
        """Add.

        Args:
            number: What.
        """
        return number


class Untyped:
    def reset(self) -> None: ...

    def add(self, number) -> int:  # noqa: ANN001
        """Add.

        Args:
            number: What.
        """
        return number


class Silent:
    """No tools and no reward."""

    def reset(self) -> str:
        return " Be brief."


NUMBER = 3


class Adder:
    """A reward for each call, up to two."""

    def reset(self, **_: Any) -> None:
        self.total = 0

    def add(self, number: int) -> int:
        """Add.

        Args:
            number: What to add.
        """
        self.total += number
        return self.total

    def get_reward(self) -> float:
        return min(self.total, 2) / 2
