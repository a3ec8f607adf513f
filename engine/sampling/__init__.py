"""From logits to target tokens: processors at every position, then greedy or coupled choice."""
