"""mixup and CutMix: what becomes of images, labels, loss and accuracy, and what the random numbers depend on."""

import pytest
import torch
from torch.nn import functional

from cputrain.training.step import count_correct
from cputrain.training.task import Mix, build_mixup, sample_losses

NOISE = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
IMAGES = NOISE.contiguous(memory_format=torch.channels_last)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


def made(seed: int = 1, **augment: float) -> Mix:
    mix = build_mixup(augment.get("mixup", 0.0), augment.get("cutmix", 0.0), outputs=3, seed=seed)
    assert mix is not None
    return mix


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_images_and_labels_are_mixed_in_the_same_shares(kind: str) -> None:
    images, labels = IMAGES.clone(), LABELS.clone()
    mixed, shares = made(**{kind: 1.0})(images, labels, (0, 0, 0))
    assert torch.equal(images, IMAGES) and torch.equal(labels, LABELS), "the batch itself stays"
    assert mixed.is_contiguous(memory_format=torch.channels_last) and mixed.shape == IMAGES.shape
    assert torch.allclose(shares.sum(1), torch.ones(6))
    own = shares.gather(1, LABELS[:, None])[:, 0]
    assert torch.allclose(own, own[0].expand(6)), "one share for the whole batch; neighbors have other labels"
    other = IMAGES.roll(1, 0)
    if kind == "mixup":
        expected = own[0] * IMAGES + (1 - own[0]) * other
        assert torch.allclose(mixed, expected, atol=1e-5)
    else:
        kept = (mixed == IMAGES).all(dim=1).float().mean(dim=(1, 2))
        assert torch.allclose(kept, own, atol=1e-5) and bool(((mixed == IMAGES) | (mixed == other)).all())


def test_random_numbers_depend_on_seed_step_rank_and_pass_alone() -> None:
    both = made(mixup=0.4, cutmix=1.0)
    before = torch.get_rng_state()
    keys = [(step, rank, number) for step in range(4) for rank in range(2) for number in range(2)]
    first = [both(IMAGES, LABELS, key)[0] for key in keys]
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    again = [made(mixup=0.4, cutmix=1.0)(IMAGES, LABELS, key)[0] for key in keys]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other = [made(seed=2, mixup=0.4, cutmix=1.0)(IMAGES, LABELS, key)[0] for key in keys]
    # a rectangle of no area changes nothing, now and then
    assert len({each.numpy().tobytes() for each in [*first, *other]}) > 24
    assert build_mixup(0.0, 0.0, outputs=3, seed=1) is None


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_the_loss_of_a_mixed_label_is_that_of_its_smoothed_shares(loss: str, smoothing: float) -> None:
    outputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(2))
    shares = torch.tensor([[0.7, 0.3, 0.0]]).repeat(6, 1)
    smoothed = shares * (1 - smoothing) + smoothing / 3
    if loss == "cross_entropy":
        expected = -(smoothed * functional.log_softmax(outputs, dim=1)).sum(1)
    else:
        expected = (outputs - smoothed).square().mean(1)
    assert torch.allclose(sample_losses(loss, outputs, shares, smoothing), expected)
    sharp = sample_losses(loss, outputs, functional.one_hot(LABELS, 3).float(), smoothing)
    assert torch.allclose(sharp, sample_losses(loss, outputs, LABELS, smoothing), atol=1e-6)


def test_a_mixed_image_counts_by_the_share_of_the_predicted_class() -> None:
    outputs = torch.tensor([[3.0, 1.0, 0.0], [0.0, 1.0, 3.0], [9.0, 0.0, 1.0]])
    shares = torch.tensor([[0.7, 0.3, 0.0], [0.7, 0.3, 0.0], [1.0, 0.0, 0.0]])
    weights = torch.tensor([1.0, 1.0, 0.0])
    assert count_correct(outputs, shares, weights, 1) == pytest.approx(0.7)
    assert count_correct(outputs, shares, weights, 2) == pytest.approx(1.0 + 0.3)
    assert count_correct(outputs, torch.tensor([0, 0, 0]), weights, 1) == 1
