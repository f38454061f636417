"""Hydra's configs of speculation, for any config of verl's: `hydra.searchpath=[pkg://sam.configs] +speculation=sam`."""
