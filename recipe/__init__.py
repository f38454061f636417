"""The verl DAPO recipe: entry points, data, reward and reports around the `sam` drafting library."""
