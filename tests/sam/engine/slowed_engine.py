"""sam.vllm.bench.engine with a drafter that sleeps."""

import sys
import time

from sam.vllm.bench import engine
from sam.vllm.proposer import SamProposer

SLEEP_SECONDS = 0.03  # several times a step of the tiny model


def propose(self, *arguments, **keywords):
    time.sleep(SLEEP_SECONDS)
    return original(self, *arguments, **keywords)


if __name__ == "__main__":
    original, SamProposer.propose = SamProposer.propose, propose
    sys.exit(engine.main())
