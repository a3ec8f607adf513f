"""Tables that are measured or fitted once: see ``outrider profile``."""
