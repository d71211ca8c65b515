"""Everything this engine replaces in mlx-lm, or takes from under its public surface, with the reason for each.

One module for each thing that is replaced; a test holds the sources they were written for
(tests/known_sources.py), so that an upgrade of mlx or mlx-lm is a decision and not an accident.

    packing          networks that run several sequences as one row of tokens, with
      packed_layer   what stands for a layer's cache and positions there
      attention      attention on quantised keys and values
      image_inputs   embeddings of images
    kv_caches        caches whose arrays stored prefixes share
    sliding_windows  windows that are rewound and shrunk, also for chunks
    wrapped_tokenizer

Elsewhere the classes of quantised layers, and of a mixture's experts, are replaced by ones with an implementation of
their own for many rows (layers/many_rows.py); and the `glob` with which mlx-lm and mlx-vlm find weights, which
takes whatever looks like weights, and no file in a folder with a bracket in its name (layers/architecture.py).
"""
