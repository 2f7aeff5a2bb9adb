"""Models of transformers, made once per session."""

import pytest
from hf_reference import HFReference


@pytest.fixture(scope="session")
def make_ref(tmp_path_factory):
    """A function that makes, once per session, the reference for a family with a head."""
    made = {}

    def make(name: str, head: str, **changes) -> HFReference:
        key = (name, head, repr(changes))
        if key not in made:
            made[key] = HFReference(name, head, tmp_path_factory.mktemp(f"{name}-{head}"), **changes)
        return made[key]

    return make
