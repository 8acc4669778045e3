"""From a verdict to what the user can do about it. Pure."""
