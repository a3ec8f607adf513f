"""Why a row of a step has no token."""

BAD_LOGITS = "the model gave NaN or infinite logits; check the weights and the dtype"
BAD_GRAMMAR = "the grammar allows no token here ({}); make it simpler"
