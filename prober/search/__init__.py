"""From trials to the next length or the answer. Pure."""
