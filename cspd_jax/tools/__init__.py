"""Programs that use the library: `sample` generates many images, `evaluation` measures
how good images are, and `demo` serves a page that shows generation."""
