"""Warnings that a peer can cause: how often they are logged."""

import structlog.testing

from fairlead.distributed.ipc.limited_log import INTERVAL_S, MOST_REASONS, LimitedLog


async def test_reason_is_logged_once_in_an_interval_with_the_number_left_out(mock_clock):
    log = LimitedLog("front refused")
    with structlog.testing.capture_logs() as logged:
        for _ in range(1000):
            log.report("the keys differ")
        log.report("another")
        mock_clock.jump(INTERVAL_S)
        log.report("the keys differ")
        log.report("another")
    assert [(each["reason"], each.get("left_out")) for each in logged] == [
        ("the keys differ", None),
        ("another", 999),
        ("the keys differ", None),
        ("another", None),
    ]


async def test_reasons_that_a_peer_makes_up_do_not_fill_the_log(mock_clock):
    log = LimitedLog("front refused")
    with structlog.testing.capture_logs() as logged:
        for number in range(10_000):
            log.report(f"protocol {number}")
            mock_clock.jump(INTERVAL_S / 5_000)
    assert len(logged) <= 3 * MOST_REASONS
    assert len(log._logged_at) <= MOST_REASONS
