"""Images for models that see: mlx-vlm's processors and vision towers, in front of mlx-lm's language networks.

The network that answers is the one that answers text, so nothing of decoding, batching and caching is different. An
image needs three things of it: embeddings in the places of its pad tokens (`input_embeddings`), for some families
attention in both directions inside an image (`make_mask` of a cache) and for some positions in two dimensions (`offset`
of a cache). tower.py makes the first, prompt_images.py says all three for a chunk of a prompt, and packed_forward.py
has them run. families.py says which family needs what.

mlx-vlm's own language models are not used. They keep the positions of the last request in themselves, and those of
Gemma 3 read images in one direction only (mlx-vlm 0.7.10), which is not how the weights were trained.
"""
