"""From a recipe to a verified output: the plan, the run loop, resume, verification."""
