import math
import re

import pytest

from trainer.algorithm.alarms import AlarmSettings, find_alarms

QUIET = {
    "logprob_difference_age_0": 0.05,
    "ess": 0.5,
    "masked_fraction": 0.2,
    "prefix_break_fraction": 0.01,
    "groups_trained_twice": 0.0,
    "loss": -1.0,
}


def test_a_metric_at_its_limit_is_quiet() -> None:
    assert find_alarms(QUIET, AlarmSettings()) == []
    assert find_alarms({}, AlarmSettings()) == []


@pytest.mark.parametrize(
    ("metric", "value", "told"),
    [
        ("logprob_difference_age_0", 0.06, r"^mismatch: .* by 0\.060 nats .* \(limit 0\.05\)"),
        ("ess", 0.49, r"^ess: .* is 49% of the tokens \(limit 50%\)"),
        ("masked_fraction", 0.25, r"^masked: .* 25% of the tokens \(limit 20%\)"),
        ("prefix_break_fraction", 0.02, r"^prefix_breaks: 2\.0% of the Steps .* \(limit 1\.0%\)"),
        ("groups_trained_twice", 1.0, r"^trained_twice: 1 groups"),
        ("skipped_steps", 2.0, r"^skipped_steps: 2 optimizer steps were skipped.* replay step"),
        ("out_of_memory", 1.0, r"^out_of_memory: 1 passes .* lower tokens_per_pack"),
        ("loss", math.nan, r"^not_finite: loss "),
        ("grad_norm", math.inf, r"^not_finite: grad_norm "),
    ],
)
def test_beyond_it_a_sentence_says_what_to_do(metric: str, value: float, told: str) -> None:
    (sentence,) = find_alarms(QUIET | {metric: value}, AlarmSettings())
    assert re.match(told, sentence)


def test_limits_can_be_set() -> None:
    calm = AlarmSettings(alarm_ess=0.1, alarm_masked=0.9)
    assert find_alarms({"ess": 0.2, "masked_fraction": 0.8}, calm) == []
