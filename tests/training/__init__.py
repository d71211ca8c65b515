"""What made the demonstration models: their corpora, training and evaluation. README.md has the commands."""
