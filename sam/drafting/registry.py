"""The sources outside the group that a drafter has, in the order in which they join the mixture.

To add one: a class as sam.drafting.sources.Source says, its name in this list, and its test.
"""

from sam.drafting.prompt_memory import PromptMemory
from sam.drafting.sources import Source

SOURCES: tuple[type[Source], ...] = (PromptMemory,)
