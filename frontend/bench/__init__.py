"""Speed measurements, always with the no-speculation baseline beside them."""
