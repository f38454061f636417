"""What trainer, agent loops and servers agree on: the seed of a response, the id of its prompt, the name of the run.

With one seed per response a run repeats exactly, and its tokens do not depend on how it was scheduled.
"""

import hashlib
import re
from collections.abc import Sequence

# Variable with a name that no other run on the machine has; recipe.sam_dapo.verl_plugin appends it to the Ray job.
SESSION = "RECIPE_SESSION"
SEED_BITS = 63  # vLLM hands seeds to torch as signed 64-bit integers


def sample_seed(run_seed: int, split: str, step: int, prompt: int, sample: int) -> int:
    """Seed of one response, in [0, 2**63). `split`, "train" or "validation", keeps the two from sharing seeds.

    `prompt` is the prompt's ordinal, in dispatch order within the step (training) or in the data (validation).
    """
    return _hash(f"{run_seed}/{split}/{step}/{prompt}/{sample}")


def further_seed(seed: int, prompt_ids: Sequence[int], repeat: int) -> int:
    """Seed of a request that a response's agent loop makes beside its first, the `repeat`th with these tokens."""
    return _hash(f"{seed}/{','.join(map(str, prompt_ids))}/{repeat}")


def _hash(identity: str) -> int:
    digest = hashlib.blake2b(identity.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def prompt_uid(step: int, prompt: int) -> str:
    """Group id that sorts in dispatch order. verl splits trajectory keys at "_", so there is none in it."""
    return f"{step:06d}-{prompt:06d}"


def parse_prompt_uid(uid: str) -> tuple[int, int] | None:
    """(step, prompt) of a uid made by :func:`prompt_uid`; None for verl's random ones (validation)."""
    numbers = re.fullmatch(r"(\d{6})-(\d{6})", uid)
    return (int(numbers[1]), int(numbers[2])) if numbers else None
