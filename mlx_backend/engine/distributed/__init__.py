"""One model on several machines: what they tell each other, and the batch that leads them."""
