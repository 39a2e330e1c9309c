"""Run each test of a block pool on the kernel and on its oracle."""

import pytest

from cext.block_pool_setting import Kernel, Oracle, PoolDriver


@pytest.fixture(params=[Kernel, Oracle], ids=["kernel", "oracle"])
def kind(request):
    return request.param


@pytest.fixture
def setting(kind):
    return PoolDriver(kind)
