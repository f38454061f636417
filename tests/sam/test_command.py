"""What commands share: other packages' noise is kept off the screen, and nothing is silent for long."""

import os
import time

import pytest

from sam.command import quiet, waiting


def test_noise_is_not_shown_unless_an_exception_follows(capfd):
    with quiet():
        os.write(1, b"a log line")
        os.write(2, b"a warning")
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ValueError), quiet():
        os.write(1, b"a reason")
        raise ValueError
    assert capfd.readouterr() == ("", "a reason")


def test_a_long_wait_is_told_also_where_all_else_is_quiet(capfd):
    with waiting("asking", silence=60):
        pass
    assert capfd.readouterr().err == ""
    with waiting("asking", silence=0.01), quiet():
        while not (said := capfd.readouterr().err):
            time.sleep(0.01)
    assert said.startswith("asking: 0 s\n")
