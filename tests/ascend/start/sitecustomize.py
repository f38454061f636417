"""On PYTHONPATH, it puts the simulated NPU under every Python process that is started."""

import simulator

simulator.install()
