"""Mutations of bytes."""

from random import Random

SPICE = (
    b"\r",
    b"\n",
    b"\r\n",
    b"\r\n\r\n",
    b"\x00",
    b"\xff",
    b" ",
    b":",
    b"0\r\n\r\n",
    b"%",
    b"-1",
    b"9" * 30,
    b"chunked",
    b"\r\n ",
    b"\r\nTransfer-Encoding: chunked\r\n",
    b"\r\nExpect: x\r\n",
)


def pieces(random: Random, data: bytes) -> list[bytes]:
    """Return `data` cut at random places."""
    cuts = sorted(random.randint(0, len(data)) for _ in range(random.randint(0, 5)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def spoiled(random: Random, data: bytes) -> bytes:
    """Return `data` unchanged, or with bytes replaced, removed, repeated or added."""
    for _ in range(random.choice([0, 1, 1, 2, 8])):
        at = random.randrange(len(data) + 1)
        to = min(len(data), at + random.choice([1, 1, 4, 50]))
        data = (
            random.choice(
                [
                    data[:at] + random.randbytes(to - at) + data[to:],
                    data[:at] + data[to:],
                    data[:to] + data[at:],
                    data[:at] + random.choice(SPICE) + data[at:],
                    data[:at],
                ]
            )
            or b"\r\n"
        )
    return data
