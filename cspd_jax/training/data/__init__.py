"""Data sets: rendered glyphs, pictures of words, folders of images, and text."""
