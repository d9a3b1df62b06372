"""In which order images arrive."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttnorm.bench.scenarios import SCENARIOS, segments

LABELS = torch.arange(50) * 7 % 10
DOMAINS = ["a", "b", "c"]


def stream(scenario, batch_size=8, seed=0, labels=LABELS):
    return segments(scenario, DOMAINS, labels, batch_size, seed)


@given(
    scenario=st.sampled_from([name for name in SCENARIOS if name != "mixed-once"]),
    batch_size=st.integers(1, 70),
    count=st.integers(1, 60),
    seed=st.integers(0, 9),
)
def test_every_image_of_every_domain_arrives_once(scenario, batch_size, count, seed):
    if scenario == "mixed-pairs":
        batch_size += batch_size % 2
    found = stream(scenario, batch_size, seed, LABELS.repeat(2)[:count])
    arrived = torch.cat([s.domains * count + s.images for s in found])
    assert torch.equal(arrived.sort().values, torch.arange(len(DOMAINS) * count))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_seed_fixes_the_order_and_another_changes_it(scenario):
    orders = [torch.cat([s.images for s in stream(scenario, seed=seed)]) for seed in (0, 0, 1)]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])


def test_continual_is_single_without_starting_anew():
    single, continual = stream("single"), stream("continual")
    assert all(torch.equal(a.images, b.images) for a, b in zip(single, continual, strict=True))
    assert [s.reset for s in single] == [True, True, True]
    assert [s.reset for s in continual] == [True, False, False]


def test_class_sorted_goes_through_the_classes_once():
    for segment in stream("class-sorted"):
        classes = LABELS[segment.images]
        assert torch.equal(classes, classes.sort().values)


def test_a_large_mixed_batch_holds_every_domain():
    (segment,) = stream("mixed")
    assert segment.domains[:50].unique().tolist() == [0, 1, 2]


def test_mixed_once_has_every_image_once_and_all_domains_in_a_large_batch():
    (segment,) = stream("mixed-once")
    assert torch.equal(segment.images.sort().values, torch.arange(len(LABELS)))
    assert segment.domains.unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize("size", [2, 8, 10])
def test_a_batch_of_pairs_holds_at_most_two_domains(size):
    (segment,) = stream("mixed-pairs", batch_size=size)
    half = size // 2
    whole = 3 * (50 // half) * half // size * size  # what is left over comes last
    domains = [part.unique().tolist() for part in segment.domains[:whole].split(size)]
    assert max(map(len, domains)) == 2
    halves = segment.domains[:whole].view(-1, half)
    assert bool((halves == halves[:, :1]).all())


@pytest.mark.parametrize("every", [10, 50])
def test_alternating_keeps_to_a_domain_for_so_many_images(every):
    (segment,) = stream(f"alternating-{every}", labels=LABELS.repeat(4))
    runs = segment.domains.view(-1, every)
    assert bool((runs == runs[:, :1]).all())
    assert len(runs[:, 0].unique()) == 3


def test_dirichlet_makes_classes_come_and_go():
    """In most stretches as long as a batch one class is ahead as it never is at random."""
    labels = torch.arange(5000) % 10
    shares = {}
    for scenario in ("dirichlet", "single", "class-sorted"):
        parts = labels[stream(scenario, labels=labels)[0].images].split(50)
        shares[scenario] = sum(part.bincount().max().item() / 50 for part in parts) / len(parts)
    assert 2 * shares["single"] < shares["dirichlet"] < shares["class-sorted"]


def test_errors():
    with pytest.raises(ValueError, match="no scenario 'mixd'; there are single"):
        stream("mixd")
    with pytest.raises(ValueError, match="batch_size is 0, expected at least 1"):
        stream("single", batch_size=0)
    with pytest.raises(ValueError, match="batch size 7, expected an even one"):
        stream("mixed-pairs", batch_size=7)
