"""The `meshnode` command."""
