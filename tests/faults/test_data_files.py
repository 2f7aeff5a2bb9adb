"""Damaged data files through whole data modules: one message, or a dataset in which every row is kept or counted."""

import pytest

from lmmods.core.errors import UserError
from lmmods.data.base import DataModule
from lmmods.data.clm import CLMData
from lmmods.data.mlm import MLMData
from lmmods.data.qa import QAData
from lmmods.data.sft import SFTData
from tests.data.conftest import spm_folder  # noqa: F401 - a fixture
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture
from tests.faults.damaged_files import make_case

TASKS = {"sft": SFTData, "clm": CLMData, "mlm": MLMData, "qa": QAData}
QA_FIELDS = {"stride": 8, "question_max_length": 16}
FILES, FILES_PER_TEST = 240, 20


@pytest.fixture
def tokenizers(spm_folder, bert_folder):  # noqa: F811
    return {"sft": spm_folder, "clm": spm_folder, "mlm": bert_folder, "qa": bert_folder}


def read(data: DataModule) -> dict:
    """Iterate over all batches and return the report of the only source."""
    data.prepare_data()
    data.setup("fit")
    loader = data.train_batches()
    for _, _batch in zip(range(len(loader)), loader):
        pass
    return next(iter(data.report["sources"].values()))


def check(seed: int, folder, tokenizers) -> str:
    """Read the damaged file of this seed; return "rejected" or "read"."""
    case = make_case(seed)
    path = folder / f"{seed}.{case.name}"
    path.write_bytes(case.contents)
    fields = QA_FIELDS if case.task == "qa" else {}
    data = TASKS[case.task](str(path), tokenizer=tokenizers[case.task], max_length=64, batch_size=2,
                            cache_dir=str(folder / "cache"), **fields)
    try:
        source = read(data)
    except UserError as error:
        assert str(path) in str(error), f"{seed}, {case.description}: {error}"
        return "rejected"
    num_kept = source["questions"] if case.task == "qa" else source["rows_kept"]
    assert num_kept + source["rows_dropped"] == source["rows_read"] > 0, f"{seed}, {case.description}"
    assert case.num_rows in (None, source["rows_read"]), f"{seed}, {case.description}"
    return "read"


@pytest.mark.parametrize("start", range(0, FILES, FILES_PER_TEST))
def test_damage_is_reported_or_every_row_is_counted(start, tmp_path, tokenizers):
    outcomes = {check(seed, tmp_path, tokenizers) for seed in range(start, start + FILES_PER_TEST)}
    assert outcomes == {"rejected", "read"}
