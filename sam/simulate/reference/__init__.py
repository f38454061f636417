"""What simulations are held against: published ratios of another system, and the best that a router can do."""
