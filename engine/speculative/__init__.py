"""Speculation on the device side: the verification that all drafters share."""
