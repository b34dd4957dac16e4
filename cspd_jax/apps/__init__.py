"""Programs built on the core, which imports none of them: `service` serves many users, `cli` adds its verbs."""
