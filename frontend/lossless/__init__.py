"""``outrider check lossless``: does speculation change what a model says, feature by feature."""
