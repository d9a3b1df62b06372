"""How a batch is cut for the kernels: tiles, slabs and grids, from its shape alone.

See the head of `triton_forward` for groups, slabs and units.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property, lru_cache

TILE = 2048  # values a program has in registers at once
ACROSS = 32  # channels side by side in a tile of a pass that reduces, at most
MAP_ACROSS = 256  # and in one of a pass that writes
PROGRAMS = 528  # that share a reduction, roughly: four for each of an H200's processors
WHOLE = 4096  # values of one channel and group that a program may hold
AGAIN = 16384  # values of one that it may read twice, the second time from the cache
PART = 16384  # pixels of one channel and sample that are not divided among programs
MOST_SLABS = 512  # of a group: what the merging program can hold
WARPS = 4


@dataclasses.dataclass(frozen=True)
class Cut:
    """All that follows from a batch's shape, group size and layout."""

    samples: int
    channels: int
    pixels: int
    group_size: int
    interleaved: bool

    @cached_property
    def groups(self) -> int:
        return _cdiv(self.samples, self.group_size)

    @cached_property
    def rows(self) -> int:
        return self.samples * self.channels

    @cached_property
    def vector(self) -> int:
        """The largest power of 2 up to 16 that divides what lies side by side in memory."""
        side_by_side = self.channels if self.interleaved else self.pixels
        return min(16, side_by_side & -side_by_side)

    @cached_property
    def across(self) -> int:
        """What lies side by side in memory, in vectors."""
        return (self.channels if self.interleaved else self.pixels) // self.vector

    @cached_property
    def parts(self) -> int:
        """Equal parts of a sample in rows: more than 1 where it is too long for one program."""
        parts = 1
        while not self.interleaved and self.pixels % (32 * parts) == 0:
            if self.pixels // parts <= PART:
                break
            parts *= 2
        return parts

    @cached_property
    def part_across(self) -> int:
        """A part of a sample in rows, in vectors; parts are multiples of 16 unless there is one."""
        return self.pixels // self.parts // self.vector

    @cached_property
    def per_unit(self) -> int:
        """Values of one channel in a unit: one pixel's, or those of a part of a sample."""
        return 1 if self.interleaved else self.pixels // self.parts

    @cached_property
    def units(self) -> int:
        """Units a group."""
        return self.group_size * self.pixels // self.per_unit

    @cached_property
    def units_in_all(self) -> int:
        return self.samples * self.pixels // self.per_unit

    @cached_property
    def whole(self) -> bool:
        """Whether a channel of a group fits into a program, so that x need be read but once."""
        size = _power_of_2(self.group_size) * _power_of_2(self.pixels)
        return not self.interleaved and size <= WHOLE

    @cached_property
    def whole_tile(self) -> dict[str, int]:
        """Channels of groups x samples x pixels."""
        down, across = _power_of_2(self.group_size), _power_of_2(self.pixels)
        channels = max(1, min(TILE // (down * across), _power_of_2(self.groups * self.channels)))
        tile = {"BLOCK_K": channels, "BLOCK_N": down, "BLOCK_S": across, "VEC": self.vector}
        return tile | {"num_warps": WARPS}

    @cached_property
    def whole_grid(self) -> tuple[int]:
        return (_cdiv(self.groups * self.channels, self.whole_tile["BLOCK_K"]),)

    @cached_property
    def again(self) -> bool:
        """Whether one program a channel and group, reading twice, is enough to fill the GPU."""
        small = not self.interleaved and self.group_size * self.pixels <= AGAIN
        return small and not self.by_rows and self.groups * self.channels >= PROGRAMS

    def again_tile(self, bytes_a_value: int) -> dict[str, int]:
        """Samples x pixels of one channel; of 16-bit values half as many are enough on their way.

        Args:
            bytes_a_value: what a value of the batch takes.
        """
        rows = max(1, self.reduce_tile["BLOCK_N"] // (2 if bytes_a_value < 4 else 1))
        return self.reduce_tile | {"BLOCK_N": rows}

    @cached_property
    def by_rows(self) -> bool:
        """Whether programs reduce rows, each a slab of its own: a group would not fill them."""
        whole = not self.interleaved and self.parts == 1
        return whole and self.units < TILE // _snug(self.pixels)

    @cached_property
    def tile_units(self) -> int:
        return 1 if self.by_rows else self.reduce_tile["BLOCK_M" if self.interleaved else "BLOCK_N"]

    @cached_property
    def slabs(self) -> int:
        """Slabs a group: as many as share the work among `PROGRAMS`, or one for every row."""
        if self.by_rows:
            return self.units
        wanted = min(PROGRAMS // (self.groups * self._programs_across), MOST_SLABS)
        return max(1, min(wanted, _cdiv(self.units, self.tile_units)))

    @cached_property
    def reduce_tile(self) -> dict[str, int]:
        """Pixels x channels, or parts of samples x pixels of one channel."""
        if self.interleaved:
            return self._interleaved_tile(ACROSS)
        across = _snug(self.per_unit)
        units = self.rows if self.by_rows else self.units
        rows = min(_power_of_2(units), max(1, TILE // across))
        return {"BLOCK_N": rows, "BLOCK_S": across, "VEC": self.vector}

    @cached_property
    def reduce_grid(self) -> tuple[int]:
        if self.by_rows:
            return (_cdiv(self.rows, self.reduce_tile["BLOCK_N"]),)
        return (self.groups * self.slabs * self._programs_across,)

    @cached_property
    def map_tile(self) -> dict[str, int]:
        """Pixels x channels, or rows x pixels."""
        if self.interleaved:
            return self._interleaved_tile(MAP_ACROSS)
        across = _snug(self.pixels)
        rows = min(_power_of_2(self.rows), max(1, TILE // across))
        return {"BLOCK_R": rows, "BLOCK_S": across, "VEC": self.vector}

    @cached_property
    def map_grid(self) -> tuple[int]:
        if self.interleaved:
            return (self.groups * self.tiles * _cdiv(self.channels, self.map_tile["BLOCK_C"]),)
        tile = self.map_tile
        return (_cdiv(self.rows, tile["BLOCK_R"]) * _cdiv(self.pixels, tile["BLOCK_S"]),)

    @cached_property
    def tiles(self) -> int:
        """What programs that write an interleaved group divide its pixels into."""
        return _cdiv(self.units, self.map_tile["BLOCK_M"])

    @cached_property
    def merge_tile(self) -> dict[str, int]:
        """Slabs x channels."""
        down = _power_of_2(self.slabs)
        across = min(_power_of_2(self.channels), max(1, 4096 // down), 256)
        return {"BLOCK_P": down, "BLOCK_C": across}

    @cached_property
    def merge_grid(self) -> tuple[int]:
        return (self.groups * _cdiv(self.channels, self.merge_tile["BLOCK_C"]),)

    @cached_property
    def _programs_across(self) -> int:
        """Programs side by side: for blocks of channels, or one for every channel."""
        if self.interleaved:
            return _cdiv(self.channels, self.reduce_tile["BLOCK_C"])
        return self.channels

    def _interleaved_tile(self, most: int) -> dict[str, int]:
        """Pixels x channels; few pixels leave room for more channels."""
        pixels = _power_of_2(self.units)
        across = min(_power_of_2(self.channels), max(most, TILE // pixels), TILE)
        return {"BLOCK_M": min(pixels, TILE // across), "BLOCK_C": across, "VEC": self.vector}


cut = lru_cache(maxsize=4096)(Cut)


def _snug(n: int) -> int:
    """A power of 2 whose multiple covers n with little to spare, as large as goes."""
    sizes = [2**k for k in range(6, 11) if 2**k <= TILE and 2**k <= _power_of_2(n)]
    sizes = sizes or [min(_power_of_2(n), TILE)]
    waste = {size: _cdiv(n, size) * size / n for size in sizes}
    snug = [size for size in sizes if waste[size] <= 1.15]
    return max(snug or [size for size in sizes if waste[size] == min(waste.values())])


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
