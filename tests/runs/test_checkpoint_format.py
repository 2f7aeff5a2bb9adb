"""Any tree survives a round trip; damage is detected before anything is read."""

import numpy as np
import pytest

from lmmods.core.errors import UserError
from lmmods.runs.checkpoint import check_manifest, join, split, write_manifest
from lmmods.runs.run_files import MANIFEST

TREE = {"a": [1, 2.5, None, True, "x"], "betas": (0.9, 0.999), "state": {0: {"m": np.arange(3)}, "b": np.ones(())},
        "empty": {}, "$odd": {"deep": [np.zeros((0, 2))]}, "nan": float("inf")}


def is_array(value):
    return isinstance(value, np.ndarray)


def are_equal(a, b) -> bool:
    if is_array(a):
        return is_array(b) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(are_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(are_equal, a, b))
    return type(a) is type(b) and a == b


def test_a_tree_survives_a_round_trip_through_json():
    import json

    tree, arrays = split(TREE, is_array)
    assert set(arrays) == {"state/0/m", "state/b", "$odd/deep/0"}
    assert are_equal(TREE, join(json.loads(json.dumps(tree)), arrays))


def test_a_value_that_cannot_be_stored_is_named():
    with pytest.raises(TypeError, match="a/0 contains a set"):
        split({"a": [{1}]}, is_array)


MANIFESTS = {"truncated": "{", "list": "[]", "empty": "{}", "number": "7", "null": "null",
             "names": '["state.json"]', "one file only": '{"state.json": [1, 2]}', "not utf-8": b"\xff",
             "deep": "[" * 100_000}


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", *MANIFESTS])
def test_a_damaged_file_or_manifest_is_an_error(tmp_path, damage):
    (tmp_path / "state.json").write_text("{}")
    file = tmp_path / "x.safetensors"
    file.write_bytes(bytes(range(200)))
    write_manifest(tmp_path)
    check_manifest(tmp_path)
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[:100])
    elif damage == "flip":
        file.write_bytes(file.read_bytes()[:-1] + b"\0")
    elif damage == "delete":
        file.unlink()
    else:
        content = MANIFESTS[damage]
        (tmp_path / MANIFEST).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match="damaged"):
        check_manifest(tmp_path)
