"""`mlx-demo-vision`, which sees shapes and numbers: its pictures, words, training and evaluation."""
