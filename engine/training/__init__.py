"""Training of draft models; ``outrider train`` is its entry."""
