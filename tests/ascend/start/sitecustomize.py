"""On PYTHONPATH, it puts the simulated NPU under every Python process that is started."""

from tests.ascend import simulator

simulator.install()
