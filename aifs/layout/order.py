"""The order of an epoch: permutations that are computed, never stored (REIMU, sec. 3; the cipher is
a Feistel network with cycle walking: Black and Rogaway, Ciphers with Arbitrary Finite Domains,
2002).

Algorithm number 1. What it gives for a seed is never changed: golden files hold it, and states that
jobs have saved rely on it. Another algorithm gets another number.
"""

from collections.abc import Sequence

ALGORITHM = 1

ROUNDS = 6

_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """A 64-bit hash of a 64-bit number (the finalizer of SplitMix64: Steele, Lea, Flood, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def key_of(seed: int, *parts: int) -> int:
    """The 64-bit key of one permutation: of a seed, and of what tells it from others (the epoch,
    what is permuted, the number of the window)."""
    key = mix(seed & _MASK)
    for part in parts:
        key = mix(key ^ (part & _MASK))
    return key


def permuted(index: int, size: int, key: int) -> int:
    """Where the permutation ``key`` of ``range(size)`` takes ``index``.

    ``size`` is at most 2**62. A few microseconds; no memory.
    """
    if size < 2:
        return index
    half_bits = ((size - 1).bit_length() + 1) // 2
    half_mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & half_mask
        for number in range(ROUNDS):
            left, right = right, left ^ (mix(key ^ (number << 56) ^ right) & half_mask)
        index = (left << half_bits) | right
        # The network permutes the next power of four: what falls outside goes round again.
        if index < size:
            return index


def file_windows(sizes: Sequence[int], window: int, key: int) -> list[list[int]]:
    """Numbers of files in the order of an epoch, cut into windows of at least ``window`` bytes each
    (the last may be smaller); 0 means one window.

    A dataset that is larger than the burst tier is staged window by window, each file once.
    """
    order = [permuted(number, len(sizes), key) for number in range(len(sizes))]
    windows: list[list[int]] = []
    room = 0
    for number in order:
        if room <= 0 and (window or not windows):
            windows.append([])
            room = window
        windows[-1].append(number)
        room -= sizes[number]
    return windows
