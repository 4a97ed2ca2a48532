"""Integrations: thin modules, each imported only by who asks for it."""
