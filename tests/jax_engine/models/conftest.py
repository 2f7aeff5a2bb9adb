"""Torch twins, made once per session."""

import pytest
from twins import Twin


@pytest.fixture(scope="session")
def twin(tmp_path_factory):
    """A function that makes, once per session, the twin of a family with a head."""
    made = {}

    def make(name: str, head: str, **changes) -> Twin:
        key = (name, head, repr(changes))
        if key not in made:
            made[key] = Twin(name, head, tmp_path_factory.mktemp(f"{name}-{head}"), **changes)
        return made[key]

    return make
