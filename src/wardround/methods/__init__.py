"""One file a system of the literature; `methods.registry` finds them by name."""
