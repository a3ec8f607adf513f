"""Steps on a GPU: state that stays there, packed inputs, one CUDA graph a step."""
