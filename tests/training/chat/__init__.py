"""`mlx-demo`, which chats: its dialogues, training and evaluation."""
