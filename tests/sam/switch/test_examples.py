"""The examples in the docstrings of what engine and policy exchange."""

import doctest

import pytest

from sam.switch import policy, step_cost


@pytest.mark.parametrize("module", [policy, step_cost])
def test_examples_run(module):
    failed, attempted = doctest.testmod(module)
    assert attempted and not failed
