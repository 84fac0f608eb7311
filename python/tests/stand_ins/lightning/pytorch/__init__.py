"""The package of Lightning's callbacks."""
