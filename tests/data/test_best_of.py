"""Best-of-n: a reward model chooses among answers."""

import pytest

from lmmods.data.sft import SFTData


@pytest.mark.parametrize(("scores", "best", "is_reported"), [([None, None], "a", True), ([None, -2.0], "b", False)])
def test_prompts_without_any_scored_answer_are_reported(spm_folder, write_jsonl, capsys, scores, best, is_reported):
    data = SFTData(path := write_jsonl([{"instruction": "Say it.", "output": "a"}]), tokenizer=spm_folder,
                   max_length=256, predict_source=path)
    data.connect(reward_model=lambda texts: scores)
    data.prepare_data()
    data.setup("predict")
    result = data.predictions(data.complete({0: ("Say it.", ["a", "b"])}))
    assert result.rows[0]["prediction"] == best and result.scores["answers_without_score"] == scores.count(None)
    assert ("the reward model scores none of the answers" in capsys.readouterr().out) is is_reported
