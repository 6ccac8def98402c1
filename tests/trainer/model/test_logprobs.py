import pytest
import torch

from trainer.model.logprobs import logprobs_of_logits, token_logprobs

PLACES, WIDE, VOCABULARY = 37, 16, 50


def inputs(bias: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(1)
    hidden = torch.randn(PLACES, WIDE, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDE, requires_grad=True)
    added = [torch.randn(VOCABULARY, requires_grad=True)] if bias else []
    return [hidden, weight, *added]


def both_ways(
    temperature: float, chunk: int | None, bias: bool
) -> list[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]]:
    targets = torch.randint(0, VOCABULARY, (PLACES,), generator=torch.Generator().manual_seed(2))
    temperatures = torch.full((PLACES,), temperature)
    temperatures[::3] = 1.0
    share = torch.linspace(-1, 1, PLACES)
    found = []
    for chunked in (True, False):
        given = inputs(bias)
        hidden, weight, added = given[0], given[1], given[2] if bias else None
        if chunked:
            told = token_logprobs(hidden, weight, added, targets, temperatures, chunk=chunk)
        else:
            logits = hidden @ weight.T
            logits = logits if added is None else logits + added
            told = logprobs_of_logits(logits, targets, temperatures)
        (told[0] * share).sum().backward()
        found.append((*told, [tensor.grad for tensor in given]))
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 10, 37, None])
@pytest.mark.parametrize("bias", [False, True])
def test_chunks_give_the_log_softmax_of_all_logits_and_its_gradient(
    temperature: float, chunk: int | None, bias: bool
) -> None:
    ours, plain = both_ways(temperature, chunk, bias)
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[1], plain[1], rtol=1e-5, atol=1e-5)
    for own, other in zip(ours[2], plain[2], strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


def test_the_temperature_is_that_of_the_place() -> None:
    hidden, weight = inputs()
    targets = torch.zeros(PLACES, dtype=torch.int64)
    warm, _ = token_logprobs(hidden, weight, None, targets, torch.full((PLACES,), 0.7))
    plain, _ = token_logprobs(hidden / 0.7, weight, None, targets, torch.ones(PLACES))
    torch.testing.assert_close(warm, plain)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight = inputs()
    weight.requires_grad_(False)
    targets = torch.zeros(PLACES, dtype=torch.int64)
    told, entropy = token_logprobs(hidden, weight, None, targets, torch.ones(PLACES), chunk=5)
    told.sum().backward()
    assert weight.grad is None
    assert hidden.grad.abs().sum() > 0
    assert not entropy.requires_grad


def test_no_places_give_nothing_and_a_gradient_of_zero() -> None:
    hidden, weight = inputs()
    none = torch.zeros(0, dtype=torch.int64)
    told, _ = token_logprobs(hidden[:0], weight, None, none, torch.ones(0))
    told.sum().backward()
    assert len(told) == 0
    assert weight.grad.abs().sum() == 0


def test_a_float32_head_is_closer_than_bf16() -> None:
    hidden, weight = inputs()
    targets = torch.zeros(PLACES, dtype=torch.int64)
    exact, _ = token_logprobs(hidden, weight, None, targets, torch.ones(PLACES))
    rounded = hidden.detach().bfloat16(), weight.detach().bfloat16()
    coarse, _ = token_logprobs(*rounded, None, targets, torch.ones(PLACES))
    fine, _ = token_logprobs(*rounded, None, targets, torch.ones(PLACES), fp32=True)
    assert (fine - exact).abs().mean() < (coarse - exact).abs().mean()
