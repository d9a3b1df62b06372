"""What tells a user's function from another, in any process."""

import collections
import dataclasses
import logging
import operator
import os
import subprocess
import sys
from functools import partial

import kornia
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ttnorm.identity import identity_of, name_of


class Shift:
    def __init__(self, by):
        self.by = by

    def __call__(self, images, generator):
        return images * self.by

    def method(self, images, generator):
        return images * self.by


def closure(by):
    return lambda images, generator: images * by


def default(by):
    def shift(images, generator, by=by):
        return images * by

    return shift


def long_weight(by):
    return partial(F.cross_entropy, weight=torch.ones(2000).index_fill(0, torch.tensor(999), by))


def keyword(by):
    def shift(images, generator, *, by=by):
        return images * by

    return shift


def edited(by):
    """A class whose code was changed between two runs."""
    names = {"nn": nn, "__name__": __name__}
    exec(f"class Edited(nn.Module):\n    def forward(self, o, y): return {by} * o", names)
    return names["Edited"]()


def with_attribute(by):
    return type("Shift", (Shift,), {"by": by})(0.0)


class Private(nn.Module):
    def __init__(self, by):
        super().__init__()
        self._by = by


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    by: float


def with_static_method(by):
    return type("Shift", (), {"of": staticmethod(lambda images: by * images)})()


def module(by):
    return nn.Sequential(nn.Threshold(by, 0.0), nn.Dropout(0.1))


KINDS = {
    "a callable object": Shift,
    "its method": lambda by: Shift(by).method,
    "an object in an object": lambda by: Shift(Shift(by)),
    "a closure": closure,
    "a default": default,
    "a keyword's default": keyword,
    "a class's code": edited,
    "a class's attribute": with_attribute,
    "a NumPy number": lambda by: partial(closure(0.1), generator=np.float32(by)),
    "an array": lambda by: Shift(np.full(3, by)),
    "one of many weights": long_weight,
    "an object in a partial": lambda by: partial(closure(0.1), generator=Shift(by)),
    "a module": module,
    "a module's private number": Private,
    "a slot": Slotted,
    "an object of C": lambda by: Shift([operator.itemgetter(by), collections.deque([by])]),
    "a static method": with_static_method,
    "a class's tuple": lambda by: type("Shift", (Shift,), {"sizes": (by,)})(0.0),
    "a list, a set and a dict": lambda by: Shift([{by}, {"by": by}]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_function_holds_tells_it_apart(kind):
    make = KINDS[kind]
    assert identity_of(make(0.9)) == identity_of(make(0.9))
    assert identity_of(make(0.9)) != identity_of(make(0.2))
    assert name_of(make(0.9)) == name_of(make(0.2))


def test_a_scripted_loss_and_a_name_without_a_value_have_identities_as_well():
    assert identity_of(torch.jit.script(nn.CrossEntropyLoss())).startswith("RecursiveScriptModule")
    if KINDS is None:
        weight = 1.0
    assert identity_of(lambda output, y: output * weight) != identity_of(lambda output, y: output)


def test_what_cannot_be_compared_is_named():
    endless = None
    for _ in range(100_000):
        endless = [endless]
    for held in (endless, torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        with pytest.raises(ValueError, match=r"Shift holds what a checkpoint cannot compare"):
            identity_of(Shift(held))


def test_what_holds_itself_has_an_identity_as_well():
    one, other = Shift(0.9), Shift(0.9)
    one.by, other.by = [one], [other]
    assert identity_of(one) == identity_of(other)
    assert identity_of(one) != identity_of(Shift([Shift(0.9)]))


def test_what_a_module_s_use_changes_does_not_count():
    used = module(0.9).eval()
    used.register_forward_hook(print)
    assert identity_of(used) == identity_of(module(0.9))
    jitter = kornia.augmentation.ColorJitter(0.4, 0.4, 0.4, 0.1)
    before = identity_of(jitter)
    jitter(torch.rand(2, 3, 8, 8))
    assert identity_of(jitter) == before
    assert identity_of(kornia.augmentation.ColorJitter(0.8, 0.4, 0.4, 0.1)) != before


def test_loggers_and_generators_of_randomness_are_not_looked_into():
    name = f"{__name__}.of a shift"
    logger, generator = logging.getLogger(name), torch.Generator()
    before = identity_of(Shift([logger, generator, np.random.default_rng(0)]))
    logging.getLogger(f"{name}.another")
    torch.rand(3, generator=generator)
    assert identity_of(Shift([logger, generator, np.random.default_rng(1)])) == before


def test_another_process_gives_the_same():
    code = (
        "from functools import partial; import torch; import logging\n"
        "from ttnorm import prior_shift\n"
        "from ttnorm.identity import identity_of\n"
        "shift = partial(prior_shift, strength=2, invert=0.5)\n"
        "both = {('a', shift), ('b', shift), ('c', logging.getLogger('ttnorm'))}\n"
        "print(identity_of(shift), identity_of(torch.nn.BCELoss(torch.ones(3))))\n"
        "print(identity_of(lambda: both))"
    )
    runs = [
        subprocess.check_output(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}
        )
        for seed in "0123"
    ]
    assert len(set(runs)) == 1
    assert runs[0].startswith(b"prior_shift(strength=2, invert=0.5) ")
