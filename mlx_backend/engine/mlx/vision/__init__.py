"""Images for models that see: mlx-vlm's processors and vision towers, in front of mlx-lm's language networks.

The network that answers is the one that answers text, so nothing of decoding, batching and caching is different. An
image needs three things of it: embeddings in the places of its pad tokens (`give_embeddings`), for some families
attention in both directions inside an image (`make_mask` of a cache) and for some positions in two dimensions (`offset`
of a cache). whole.py has mlx-vlm's network share the weights, tower.py asks it for what an image needs, image_trial.py
compares its logits, prompt_images.py says what a chunk of a prompt needs, and packed_forward.py has it run.

What fails the trial, and what mlx-lm has no network for, runs on mlx-vlm's own network (vlm_batch.py), which keeps the
positions of one request in itself; where only pictures fail, texts run in the batch next to it (split_batch.py).
"""
