"""Further paths of a text beside its draft."""
