"""`mlx-demo-embedding`, whose vectors of sentences near in meaning are near: its corpus, training and evaluation."""
