"""A model's stages on several ranks: schedules as data, and a loop that runs them."""
