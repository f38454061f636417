"""What measures, replays, simulates and shows: built on the drafting library, which knows none of it."""
