"""Stands in for the package mooncake-transfer-engine, which is not among the pins and wants a network."""
