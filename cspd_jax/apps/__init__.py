"""Programs built on the core: `service` serves many users, `cli` adds the verbs of all programs."""
