"""The size of gradient buckets."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cputrain.predict.collectives import MAX_BUCKET_BYTES, MIN_BUCKET_BYTES, bucket_bytes, fit_alpha_beta


@given(alpha=st.floats(1e-6, 1e-2), beta=st.floats(1e-12, 1e-7))
def test_the_fit_finds_the_line_of_its_points(alpha: float, beta: float) -> None:
    points = [(float(size), alpha + beta * size) for size in (1 << 14, 1 << 18, 1 << 20, 1 << 24)]
    found = fit_alpha_beta(points)
    assert found[0] == pytest.approx(alpha, rel=1e-6, abs=1e-9) and found[1] == pytest.approx(beta, rel=1e-6)


@given(gradient=st.integers(1 << 20, 1 << 32), alpha=st.floats(1e-7, 1e-1), beta=st.floats(1e-13, 1e-6))
def test_no_other_bucket_exposes_less(gradient: int, alpha: float, beta: float) -> None:
    def exposed(bucket: float) -> float:
        return alpha * gradient / bucket + beta * bucket

    chosen = bucket_bytes(gradient, alpha, beta)
    assert MIN_BUCKET_BYTES <= chosen <= MAX_BUCKET_BYTES
    for other in (MIN_BUCKET_BYTES, chosen / 2, chosen * 2, MAX_BUCKET_BYTES):
        if MIN_BUCKET_BYTES <= other <= MAX_BUCKET_BYTES:
            assert exposed(chosen) <= exposed(other) * (1 + 1e-6)


def test_the_published_network_on_a_fast_link_gets_a_few_mib() -> None:
    """ResNet-50's 102 MB of gradients, 20 us and 10 GB/s."""
    assert bucket_bytes(102_228_128, 20e-6, 1e-10) == pytest.approx(math.sqrt(20e-6 * 102_228_128 / 1e-10), rel=1e-3)
