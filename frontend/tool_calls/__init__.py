"""Tool calls: what a request declares, how the model is held to it, and the calls in its text."""
