"""Data sets: rendered glyphs, pictures of words, handwritten digits, folders of images, text."""
