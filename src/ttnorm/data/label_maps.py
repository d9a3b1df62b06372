"""What labels in the masks of street scenes mean, as the 19 classes that Cityscapes trains on.

Every label that a data set knows is here; those outside the 19 classes are VOID.
"""

from __future__ import annotations

from collections.abc import Mapping

from .images import VOID

CITYSCAPES_CLASSES = (
    "road",
    "sidewalk",
    "building",
    "wall",
    "fence",
    "pole",
    "traffic light",
    "traffic sign",
    "vegetation",
    "terrain",
    "sky",
    "person",
    "rider",
    "car",
    "truck",
    "bus",
    "train",
    "motorcycle",
    "bicycle",
)
CAMVID_CLASSES = (
    "sky",
    "building",
    "pole",
    "road",
    "pavement",
    "tree",
    "sign",
    "fence",
    "car",
    "pedestrian",
    "bicyclist",
)


def _to_classes(labels: int, classes: Mapping[str, tuple[int, ...]]) -> dict[int, int]:
    """From every label below `labels` to its class, or VOID."""
    found = dict.fromkeys(range(labels), VOID)
    for number, name in enumerate(CITYSCAPES_CLASSES):
        found |= dict.fromkeys(classes[name], number)
    return found


# labelIds, as in the files gtFine_labelIds.png and in GTAV's
_CITYSCAPES = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
CITYSCAPES = _to_classes(
    35, {name: (i,) for name, i in zip(CITYSCAPES_CLASSES, _CITYSCAPES, strict=True)}
)
CITYSCAPES[255] = VOID  # the licence plate, -1, as a byte
# the 19 classes themselves
TRAIN_IDS = {**{i: i for i in range(19)}, VOID: VOID}
# Vistas 1.2, as RobustNet grouped them, which the paper follows
MAPILLARY = _to_classes(
    66,
    {
        "road": (13, 24, 41),  # with lane markings and manholes
        "sidewalk": (2, 15),  # with curbs
        "building": (17,),
        "wall": (6,),
        "fence": (3,),
        "pole": (45, 47),
        "traffic light": (48,),
        "traffic sign": (50,),
        "vegetation": (30,),
        "terrain": (29,),
        "sky": (27,),
        "person": (19,),
        "rider": (20, 21, 22),
        "car": (55,),
        "truck": (61,),
        "bus": (54,),
        "train": (58,),
        "motorcycle": (57,),
        "bicycle": (52,),
    },
)
# SYNTHIA-RAND-CITYSCAPES
SYNTHIA = _to_classes(
    23,
    {
        "road": (3,),
        "sidewalk": (4,),
        "building": (2,),
        "wall": (21,),
        "fence": (5,),
        "pole": (7,),
        "traffic light": (15,),
        "traffic sign": (9,),
        "vegetation": (6,),
        "terrain": (16,),
        "sky": (1,),
        "person": (10,),
        "rider": (17,),
        "car": (8,),
        "truck": (18,),
        "bus": (19,),
        "train": (20,),
        "motorcycle": (12,),
        "bicycle": (11,),
    },
)
CAMVID = {**{i: i for i in range(len(CAMVID_CLASSES))}, len(CAMVID_CLASSES): VOID}
