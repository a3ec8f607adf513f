"""``outrider doctor``: is a draft fit for its target, and does it draft as a healthy one does."""
