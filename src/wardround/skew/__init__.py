"""How the clients differ before any training: in their labels, sizes, features and concepts."""
