"""Programs built on the library: many images, and how good they are."""
