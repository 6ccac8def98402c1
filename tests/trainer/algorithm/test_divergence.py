from math import exp, log

import pytest

from tests.trainer.algorithm.packs import gradient_of, tensor
from trainer.algorithm.choices import KLEstimator
from trainer.algorithm.divergence import binary_kl, reference_kl


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", -0.5, 1.0),
        ("k2", 0.125, -0.5),
        ("k3", exp(0.5) - 0.5 - 1, 1 - exp(0.5)),
    ],
)
def test_estimators(estimator: KLEstimator, value: float, slope: float) -> None:
    current = tensor([-2.0], gradient=True)
    found = reference_kl(current, tensor([-1.5]), estimator)
    assert found.tolist() == pytest.approx([value])
    assert gradient_of(found, current) == pytest.approx([slope])


def test_an_estimate_is_bounded() -> None:
    current = tensor([-30.0, -4.0, 0.0], gradient=True)
    reference = tensor([0.0, 0.0, -30.0])
    assert reference_kl(current, reference, "k1").tolist() == [-20.0, -4.0, 20.0]
    assert reference_kl(current, reference, "k2").tolist() == [200.0, 8.0, 200.0]
    found = reference_kl(current, reference, "k3")
    assert found.tolist() == pytest.approx([10.0, 10.0, 10.0])
    assert gradient_of(found, current) == [0.0, 0.0, 0.0]


def test_k3_is_never_negative() -> None:
    close = tensor([-1.0, -1.0, -1.0])
    assert (reference_kl(close, tensor([-1.0, -1.0001, -0.9999]), "k3") >= 0).all()


def test_the_binary_kl_is_that_of_two_coins() -> None:
    found = binary_kl(tensor([log(0.75)]), tensor([log(0.5)])).item()
    assert found == pytest.approx(0.75 * log(1.5) + 0.25 * log(0.5))
    assert binary_kl(tensor([log(0.3)]), tensor([log(0.3)])).item() == pytest.approx(0, abs=1e-7)
