"""Drafts behind tokens that the automaton has not learnt yet.

A host that waits for no step learns its tokens a step or more later. Drafts need not wait: from where the learnt text
ends they walk over the missing tokens by the rules of sam.drafting.context_mixing, changing nothing, and go on from
there. This is what sam.vllm.v2.device_walk does on a device.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from sam.automaton.store import NONE
from sam.drafting.context_mixing import Place, advance, draft_from, end_of, find_contexts, follow_recovery
from sam.drafting.drafter import NOTHING, Drafter
from sam.drafting.texts import RECENT_TOKENS, Drafts, make_sequences
from sam.jit import compiled


@compiled
def draft_behind(store, memory, learned, sequences, slot, pending, branch, budget):
    """Draft for a slot's text with `pending` (int32 [length]) behind it, into slot 0 of `branch` (Sequences [1])."""
    branch.texts[0] = sequences.texts[slot]
    branch.recent_tokens[0] = sequences.recent_tokens[slot]
    text = branch.texts[0]
    text.num_drafted = 0
    if text.group == NONE:
        return
    place = end_of(store, text)
    for i in range(pending.size):
        token = np.int64(pending[i])
        contexts, match_len = find_contexts(store, place)
        follow_recovery(store, contexts, match_len, text, token)
        state, length = advance(store, place.state, place.length, token)
        place = Place(state, length, text.recovery_state, text.recovery_match_len, text.tokens_since_mismatch)
        branch.recent_tokens[0, text.num_tokens % RECENT_TOKENS] = token
        text.num_tokens += 1
    draft_from(store, memory, learned, branch, 0, place, budget, 0.0)


class LateDrafter:
    """A drafter that learns what is appended `late` steps later, and drafts behind all of it nevertheless.

    A call to `append` is a step. Probabilities of drafts are raw: nothing that is drafted late is calibrated.

    Attributes:
        pending: int32 [length], by request: its newest tokens, which have not been learnt.
    """

    def __init__(self, drafter: Drafter, late: int):
        self.drafter = drafter
        self.late = late
        self._steps: deque[tuple] = deque()  # arguments of `append`, the oldest first
        self.pending: dict[str, np.ndarray] = {}
        self._branch = make_sequences(1, drafter.max_draft_tokens)

    def start(self, request_id: str, prompt_token_ids: np.ndarray) -> None:
        """As Drafter.start."""
        self.drafter.start(request_id, prompt_token_ids)
        self.pending[request_id] = NOTHING

    def append(self, request_ids: Sequence[str], token_ids: np.ndarray, offsets: np.ndarray) -> None:
        """As Drafter.append, `late` steps later."""
        for row, name in enumerate(request_ids):
            new = token_ids[offsets[row] : offsets[row + 1]]
            self.pending[name] = np.concatenate([self.pending[name], new], dtype=np.int32)
        self._steps.append((request_ids, token_ids, offsets))
        self._learn(self.late)

    def _learn(self, late: int) -> None:
        """Learn all steps but the newest `late`."""
        while len(self._steps) > late:
            step = self._steps.popleft()
            self.drafter.append(*step)
            for name, length in zip(step[0], np.diff(step[2]), strict=True):
                self.pending[name] = self.pending[name][length:]

    def draft(self, request_ids: Sequence[str], budgets: np.ndarray) -> Drafts:
        """As Drafter.draft, one request after the other."""
        drafter = self.drafter
        text = self._branch.texts[0]
        parts = drafter.store, drafter.memory, drafter.learned, drafter.sequences
        tokens: list[np.ndarray] = []
        acceptance: list[np.ndarray] = []
        for name, slot, budget in zip(request_ids, drafter.slots_of(request_ids), budgets, strict=True):
            draft_behind(*parts, slot, self.pending[name], self._branch, np.int64(budget))
            tokens.append(self._branch.draft_tokens[0, : text["num_drafted"]].copy())
            acceptance.append(self._branch.draft_acceptance[0, : text["num_drafted"]].astype(np.float32))
        offsets = np.cumsum([0, *map(len, tokens)])
        return Drafts(np.concatenate(tokens), offsets, np.concatenate(acceptance))

    def finish(self, request_id: str) -> None:
        """As Drafter.finish, once all that waits is learnt."""
        self._learn(0)
        self.drafter.finish(request_id)
        del self.pending[request_id]
