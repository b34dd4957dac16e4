"""Programs built on the library: many images, how good they are, and a page to look at
them."""
