"""Settings: read from flags, files and presets, resolved once, and checked."""
