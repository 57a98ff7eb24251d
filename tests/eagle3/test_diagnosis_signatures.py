"""Curves of closed form, and the family of faults that each looks like."""

import pytest

from eagle3.diagnosis import signatures as s

GOOD = (0.75, 0.8, 0.8, 0.8)


@pytest.mark.parametrize(
    ("served", "name"),
    [
        (GOOD, s.FLAT),
        ((0.03, 0.02, 0.0, 0.0), s.DEAD),
        ((0.25, 0.6, 0.7, 0.75), s.FEATURES),
        ((0.75, 0.4, 0.2, 0.1), s.DEEPER),
        ((0.45, 0.2, 0.15, 0.1), s.COLLAPSE),
        ((0.55, 0.6, 0.6, 0.6), s.EVEN),
    ],
)
def test_a_curve_as_served_beside_the_one_as_trained(served, name):
    assert s.named(served, GOOD) == name


def test_a_curve_that_collapses_even_as_trained_is_no_flat_one():
    assert s.named((0.5, 0.1, 0.1), (0.5, 0.1, 0.1)) == s.COLLAPSE


def test_feedback_spares_the_first_step_and_features_do_not():
    spared = s.Signature(name=s.DEEPER, served=(), trained=())
    hit = s.Signature(name=s.FEATURES, served=(), trained=())
    assert s.speaks_against("states", spared)
    assert not s.speaks_against("feedback", spared)
    assert s.speaks_against("feedback", hit)
    assert not s.speaks_against("residual", hit)
