"""What a device can do, found out on the device that is here."""

from __future__ import annotations

from inference.probe import measure_rates


def test_weights_are_worked_through_at_a_rate_that_a_computer_can_have() -> None:
    rates = measure_rates("CPU")
    assert 1e7 < rates.decode < 1e13
    # Many rows share what one row has to read.
    assert rates.decode < rates.prefill < 1e16
