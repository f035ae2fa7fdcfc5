"""MD2 (RFC 1319) and its HMAC (RFC 2104), written from the RFCs for comparison with the simulator's."""

from collections.abc import Iterator
from functools import cache

BLOCK = 16


def digits_of_pi() -> Iterator[int]:
    """Gibbons, "Unbounded Spigot Algorithms for the Digits of Pi"."""
    q, r, t, k, n, m = 1, 0, 1, 1, 3, 3
    while True:
        if 4 * q + r - t < n * t:
            yield n
            q, r, n = 10 * q, 10 * (r - n * t), 10 * (3 * q + r) // t - 10 * n
        else:
            q, r, t, n, k, m = (
                q * k, (2 * q + r) * m, t * m, (q * (7 * k + 2) + r * m) // (t * m), k + 1, m + 2,
            )  # fmt: skip


@cache
def substitution() -> tuple[int, ...]:
    """RFC 1319, 3.2: a permutation that is a shuffle (Knuth, 3.4.2 P) by the digits of pi."""
    digits = digits_of_pi()

    def below(limit: int) -> int:
        while True:
            value, range_ = next(digits), 10
            while range_ < limit:
                value, range_ = 10 * value + next(digits), 10 * range_
            if value < limit * (range_ // limit):
                return value % limit

    table = list(range(256))
    for size in range(2, 257):
        other = below(size)
        table[other], table[size - 1] = table[size - 1], table[other]
    return tuple(table)


def md2(message: bytes) -> bytes:
    table = substitution()
    padding = BLOCK - len(message) % BLOCK
    message += bytes([padding]) * padding
    checksum, last = bytearray(BLOCK), 0
    for at in range(0, len(message), BLOCK):
        for j in range(BLOCK):
            checksum[j] ^= table[message[at + j] ^ last]
            last = checksum[j]
    message += checksum
    state = bytearray(3 * BLOCK)
    for at in range(0, len(message), BLOCK):
        for j in range(BLOCK):
            state[BLOCK + j] = message[at + j]
            state[2 * BLOCK + j] = state[BLOCK + j] ^ state[j]
        t = 0
        for round_ in range(18):
            for k in range(3 * BLOCK):
                state[k] ^= table[t]
                t = state[k]
            t = (t + round_) % 256
    return bytes(state[:BLOCK])


def hmac(key: bytes, message: bytes) -> bytes:
    """HMAC with a key of one block."""
    inner = md2(bytes(byte ^ 0x36 for byte in key) + message)
    return md2(bytes(byte ^ 0x5C for byte in key) + inner)
