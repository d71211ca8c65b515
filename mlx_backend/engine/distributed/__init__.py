"""One model on several machines: how the ranks connect, what they send each other, and the batch that leads them."""
