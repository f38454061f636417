"""The paired test of two runs sees a difference where there is one."""

import numpy as np
import pytest

from recipe.report.paired_test import sign_flip_p_value


@pytest.mark.parametrize(("gain", "significant"), [(0.0, False), (0.15, True)])
def test_the_paired_test_sees_a_difference(gain, significant):
    chance = np.random.default_rng(1)
    ability = chance.uniform(0.2, 0.7, (200, 1))
    off = (chance.random((200, 8)) < ability).astype(float)
    on = (chance.random((200, 8)) < ability + gain).astype(float)
    assert (sign_flip_p_value(on.mean(1) - off.mean(1)) < 0.01) == significant
