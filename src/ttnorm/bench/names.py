"""What readers call norms, methods, data sets, scenarios and variants of post-training."""

from __future__ import annotations

NAMES = {
    "source": "Source (CBN)",
    "tbn": "TBN",
    "alpha-bn": "α-BN",
    "adaptive-bn": "AdaptiveBN",
    "mixnorm": "MixNorm",
    "ema": "EMA",
    "ttn": "TTN",
    "ttn-scaled": "TTN (scaled)",
    "ttn-counted": "TTN (stronger prior, by batch size)",
    "ttn-dynamic": "TTN (dynamic)",
    "ttn-stream": "TTN (stream)",
    "ttn-corrected": "TTN (stream, one domain)",
    "ttn-balanced": "TTN (stream, balanced)",
    "ttn-pool": "TTN (stream, one pool)",
}
METHOD_NAMES = {"cotta": "CoTTA", "ttn-online": "online", "sliding": "TBN of the last 200 inputs"}

# Variants of post-training that are compared, and what readers call them
ABLATIONS = {
    "Components: where alpha starts, and what pulls at it": {
        "random-mse": "random start, MSE",
        "random-ce": "random start, CE",
        "random-ce-mse": "random start, CE + MSE",
        "prior-alone": "the prior itself",
        "prior-ce": "from the prior, CE",
        "default": "from the prior, CE + MSE",
    },
    "Granularity: what shares one alpha": {
        "default": "channel",
        "layer-mean": "layer, mean of its channels",
        "constant-mean": "everything, mean of all channels",
        "layer": "layer, optimised",
    },
    "Regulariser: the weight of the distance to the prior": {
        "prior-ce": "λ = 0",
        "lambda-0.1": "λ = 0.1",
        "default": "λ = 1",
        "lambda-10": "λ = 10",
    },
    "Prior: how strong the shift is that it is measured under": {
        "default": "jitter ±0.4, one image in ten inverted (default)",
        "prior-strong": "jitter ±0.8, one image in two inverted",
    },
    "Augmentation: one part more in every row": {
        "prior-jitter": "prior: colour jitter",
        "prior-grayscale": "prior: + grayscale",
        "default": "prior: + invert; alpha: + flip (default)",
        "prior-blur": "prior: + Gaussian blur",
        "prior-flip": "prior: + horizontal flip",
        "alpha-jitter": "alpha: colour jitter, padding",
        "alpha-affine": "alpha: + affine",
        "alpha-blur": "alpha: + Gaussian blur",
    },
}

# Data sets and scenarios, in the order of a page; what else there is comes after them
DATASETS = {
    "cifar10-c": "CIFAR-10-C",
    "cifar100-c": "CIFAR-100-C",
    "imagenet-c": "ImageNet-C",
    "camvid": "CamVid",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
}
SCENARIOS = {
    "single": "Single domain: one corruption after another, starting anew at each",
    "continual": "Continual: one corruption after another, never starting anew",
    "mixed": "Mixed: all corruptions in one random order",
    "mixed-once": "Mixed once: every image under one random corruption",
    "mixed-pairs": "Mixed in pairs: every batch holds two corruptions, half and half",
    "class-sorted": "Class-sorted: one corruption after another, each sorted by class",
    "dirichlet": "Dirichlet: one corruption after another, in which classes come and go",
    **{
        f"alternating-{every}": f"Alternating every {every} images: then comes another corruption"
        for every in (10, 50, 200)
    },
    "source": "Source: the clean test set",
}


def row_name(norm: str, method: str) -> str:
    """What readers call a norm and method.

    Example:
        >>> row_name("ttn", "tent"), row_name("constant-0.3", "none")
        ('TENT + TTN', 'α = 0.3')
    """
    name = NAMES.get(norm, norm.replace("constant-", "α = "))
    if method == "none":
        return name
    title = METHOD_NAMES.get(method, method.upper())
    return title if norm == "tbn" else f"{title} + {name}"


def data_name(title: str) -> str:
    """A title that begins with a data set, spelt as its authors do.

    Example:
        >>> data_name("imagenet-c, mobilenet_v2")
        'ImageNet-C, mobilenet_v2'
    """
    dataset, comma, rest = title.partition(",")
    return DATASETS.get(dataset, dataset) + comma + rest


def scenario_name(scenario: str) -> str:
    """The first words of its title.

    Example:
        >>> scenario_name("single")
        'single domain'
    """
    return SCENARIOS.get(scenario, scenario).partition(":")[0].lower()
