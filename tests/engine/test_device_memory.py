"""The KV cache size on a device that other processes also use."""

import pytest

from fairlead.base.errors import LoadFailed
from fairlead.engine.device_memory import cache_bytes, share_bytes

MIB = 1024 * 1024


class Device:
    """10,000 MiB, partly taken by this process and partly by others."""

    def __init__(self, *, taken_mb: int, others_mb: int = 0) -> None:
        self._taken_mb, self._others_mb = taken_mb, others_mb

    def free_and_total(self) -> tuple[int, int]:
        return (10_000 - self._taken_mb - self._others_mb) * MIB, 10_000 * MIB

    def taken(self) -> int:
        return self._taken_mb * MIB


@pytest.mark.parametrize(
    ("gpu_memory", "taken_mb", "expected_mb"),
    [(None, 1000, 8100), (0.5, 1000, 3600), (1, 1000, 8100), (5000, 1000, 3600), (2000.0, 1500, 450)],
)
def test_cache_gets_nine_tenths_of_what_the_weights_leave(gpu_memory, taken_mb, expected_mb):
    assert cache_bytes(Device(taken_mb=taken_mb), gpu_memory) == expected_mb * MIB


def test_cache_beside_other_processes_gets_nine_tenths_of_what_is_free():
    assert cache_bytes(Device(taken_mb=1000, others_mb=4000), None) == 4500 * MIB


def test_cache_is_not_larger_than_its_own_limit():
    assert cache_bytes(Device(taken_mb=1000), 0.5, 100 * MIB) == 100 * MIB
    assert cache_bytes(Device(taken_mb=1000), 0.5, 100_000 * MIB) == 3600 * MIB


def test_share_that_others_have_taken_is_refused_with_both_numbers():
    with pytest.raises(LoadFailed) as refused:
        cache_bytes(Device(taken_mb=1000, others_mb=6000), 0.5)
    assert refused.value.message == (
        "gpuMemory: 4000 MiB more are needed, and only 3000 MiB of the device's memory are free"
    )


def test_share_that_the_weights_fill_is_refused():
    with pytest.raises(LoadFailed, match="gpuMemory: 1000 MiB are too few: 1000 MiB are taken already"):
        cache_bytes(Device(taken_mb=1000), 1000)


def test_number_above_one_is_in_mib():
    assert [share_bytes(share, 8192 * MIB) for share in (0.5, 1.0, 2.0)] == [4096 * MIB, 8192 * MIB, 2 * MIB]
