"""Images on their way in: from what a request names to upright RGB pixels within limits.

    ImageSource ─data_uri, fetch─▶ bytes ─decode, detail─▶ Picture        loader.py does it; the others are its parts

Knows no API, no model and no MLX. Pillow, which the extra `vision` installs, is imported when an image is decoded.
"""
