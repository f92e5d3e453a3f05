"""``chambers site``: certificates, keys, signed releases and checks of a deployment."""
