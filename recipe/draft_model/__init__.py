"""A small draft model for a target, distilled from the target's own responses."""
