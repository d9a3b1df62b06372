"""Records of errors that nobody measured, for tests of what is made of records."""

import itertools

from ttnorm.data.corruptions import CORRUPTIONS


def record(norm="ttn", batch_size=200, domain="fog", wrong=10, **changes):
    return {
        "dataset": "cifar10-c",
        "severity": 5,
        "domain": domain,
        "scenario": "single",
        "norm": norm,
        "method": "none",
        "batch_size": batch_size,
        "seed": 0,
        "n": 100,
        "wrong": wrong,
        "model": {"name": "wrn"},
        "config": {"subset": 100, "domains": list(CORRUPTIONS)},
        **changes,
    }


def all_domains(norm, batch_size, wrong, **changes):
    return [record(norm, batch_size, d, wrong + i, **changes) for i, d in enumerate(CORRUPTIONS)]


RECORDS = list(
    itertools.chain.from_iterable(
        all_domains(norm, size, wrong)
        for norm, wrong in (("source", 20), ("tbn", 15), ("ttn", 5), ("constant-0.3", 8))
        for size in (200, 1)
    )
)


def fitted(variant, seed, records):
    """As if they had been scored with a variant of post-training."""
    name = f"wrn.{variant}.seed{seed}.ttn.safetensors"
    return [r | {"alpha": {"name": name, "fingerprint": f"{variant}{seed}"}} for r in records]
