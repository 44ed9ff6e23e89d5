"""The compiler side: exchange -> region -> proof -> rewrite. Never runs an exchange."""
