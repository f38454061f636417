"""`python -m sam.compile_kernels`: compiles the drafter's and the policy's kernels into their cache.

An engine compiles what it does not find there before its first step, which takes most of a minute of CPU time.
"""

from sam.drafting.drafter import Drafter
from sam.switch import policies


def main() -> None:
    Drafter(max_draft_tokens=1, memory_budget_bytes=1 << 20).warm_up()
    policies.warm_up()


if __name__ == "__main__":
    main()
